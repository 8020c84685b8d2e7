"""Pure functions, no I/O, no clock of their own: what is wanted, what is seen, what to do, what to say."""
