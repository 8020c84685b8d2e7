"""What a real kubelet says of a pod in trouble: the fields and events that the operator reads, asserted one by one.

Whatever imitates a node in other tests must say the same.
"""
