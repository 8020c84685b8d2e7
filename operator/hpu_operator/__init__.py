"""The operator: HpuInference objects in, running groups of engine pods out."""
