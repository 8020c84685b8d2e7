"""Which shapes a step can have, and which of them are compiled."""
