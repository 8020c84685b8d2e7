"""Load on any OpenAI-compatible server, and figures that can be compared: a client of the API, without torch."""
