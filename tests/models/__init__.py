"""Checkpoints for tests, the demo and benchmarks: SmolLM2 with its real weights, and tiny random ones of every family.

Nothing here is committed as data: real weights are fetched by name and hash, random ones are drawn from a seed, both
are cached outside the tree. `python -m tests.models smollm2 DIR` writes one for use elsewhere.
"""
