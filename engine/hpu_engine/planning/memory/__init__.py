"""Does it fit: weights, KV cache and activations of one card."""
