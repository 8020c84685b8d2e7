"""Pure functions without I/O or a clock: what is wanted, what is seen, what to do, what to say."""
