"""OpenAI's routes: bodies in, bodies and events out."""
