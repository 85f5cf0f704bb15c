"""Options that are chosen for a model by rules: layout, handles of cuDNN, threads for the CPU."""
