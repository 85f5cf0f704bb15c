"""The guard: every InferenceSession of the process gives the guarantee of a GPUSession."""
