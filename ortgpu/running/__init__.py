"""Fast runs: staging, pinned memory, copies, CUDA graphs, map, arrays of other libraries."""
