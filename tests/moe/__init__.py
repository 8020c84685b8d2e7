"""The mixture of experts: each part alone, and all of them over an in-process set of ranks."""
