"""What is known: watched objects, control endpoints, and both put together."""
