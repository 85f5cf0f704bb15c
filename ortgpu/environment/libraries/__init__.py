"""Facts about CUDA libraries: their names, their files, and the loader that opens them."""
