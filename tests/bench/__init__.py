"""Measurements: that the bench measures what it says, and the engine beside a peer (`python -m tests.bench`)."""
