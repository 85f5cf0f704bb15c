"""Options that are chosen for a model by rules: image layout, cuDNN handles, CPU threads."""
