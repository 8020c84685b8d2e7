"""What may be set: one closed list, and the surfaces that set it. Torch-free."""
