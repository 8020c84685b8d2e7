"""What the server process and its workers say to each other. Torch-free."""
