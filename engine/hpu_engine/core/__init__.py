"""Request, KV blocks, scheduler, batch, step loop, sampler, detokenizer. Only batch, sampler and loop import torch."""
