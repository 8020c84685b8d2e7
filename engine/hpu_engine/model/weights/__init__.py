"""Checkpoints: which tensor is which parameter (`name_table`), and reading them (`safetensors_files`, `loading`)."""
