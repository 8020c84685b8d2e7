"""One transformer described by data, and how its weights get in."""
