"""Facts that only ranks and training need: MPI, NCCL, network, ssh, training packages."""
