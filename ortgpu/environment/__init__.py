"""Facts: what this machine, this process and these packages are. Probes read and never judge."""
