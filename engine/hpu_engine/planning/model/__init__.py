"""What a model is: its description, read from a config.json."""
