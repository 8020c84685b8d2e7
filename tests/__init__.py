"""Tests, and the ground they stand on: a real Kubernetes (`tests.cluster`), real weights (`tests.models`), images."""
