"""Every family against transformers: logits, sharded and whole, and real weights upcycled to experts."""
