"""Facts about CUDA libraries: which are needed, where they are, and how the loader opens them."""
