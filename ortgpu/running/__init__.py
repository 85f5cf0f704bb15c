"""What makes a run fast: staging, pinned memory, copies, CUDA graphs, map, arrays of other libraries."""
