"""The back ends a step runs on: cpu, emulated, hpu."""
