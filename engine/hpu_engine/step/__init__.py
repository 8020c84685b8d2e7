"""One step: its shapes, its batch, the sampler, and the loop that runs it."""
