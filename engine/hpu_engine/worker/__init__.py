"""The process that drives one card: start-up, warm-up, serving."""
