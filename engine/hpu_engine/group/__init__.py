"""What ranks exchange: collectives."""
