"""Facts about the driver and the GPUs."""
