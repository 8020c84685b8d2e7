"""Kernels for the CPU where torch's operators are too slow: built ahead for AMX, or at a start for any (`--compile`).

Why not torch.compile: measured on SmolLM2's shapes on one thread, calling what it compiled costs 24-63 microseconds at
one row and 63-350 at 32, where torch's own norm, gate and rotation take 7-35 and 34-78: its guards and wrappers cost
more than its fusion saves, and it keeps a second copy of every weight that it packs.
"""
