"""Which requests share the next step: requests, KV blocks, scheduler. Torch-free."""
