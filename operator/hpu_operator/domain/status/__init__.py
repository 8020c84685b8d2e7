"""What the status of an object says. Pure."""
