"""The guard: every InferenceSession of the process keeps the promise of a GPUSession."""
