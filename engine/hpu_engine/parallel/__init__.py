"""Ranks that compute one thing together: what they say to each other, in this process or between processes."""
