"""The CPU device and its kernels."""
