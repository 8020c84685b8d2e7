"""The server process of a pod: OpenAI routes, control endpoint, tokenizer, supervision of workers. No torch."""
