"""The images of both programs without a container registry: a base image from Debian packages, the project's Dockerfile
on it, an OCI layout on disk, and from there into the nodes of a test cluster or to a user's own registry.

    python -m tests.images build [TARGET ...]     build what has changed
    python -m tests.images push HOST[:PORT]/PREFIX  push what was built
"""
