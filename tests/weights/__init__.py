"""From a checkpoint to parameters: one table, two drivers, exactly the bytes needed, every refusal named."""
