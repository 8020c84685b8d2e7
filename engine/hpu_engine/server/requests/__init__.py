"""From a checked request to sequences on a rank, and back to text."""
