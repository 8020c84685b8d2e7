"""`LLM(...)`: one rank in this process, without a server."""
