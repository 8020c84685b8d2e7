"""What a user writes and reads: the `HpuInference` models, the CRD generated from them, conditions and reasons."""
