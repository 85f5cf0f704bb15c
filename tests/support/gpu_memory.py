"""The memory of a GPU in use by all processes, as NVML has it."""

from __future__ import annotations

from ortgpu.environment.gpu.driver import read_gpu_memory


def used_bytes(uuid: str) -> int:
    """Return the bytes in use. NVML has to know the GPU."""
    memory = read_gpu_memory(uuid)
    assert memory is not None
    return memory[1] - memory[0]
