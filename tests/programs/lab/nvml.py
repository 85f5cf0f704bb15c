"""What a program asks the lab's NVML, by NVIDIA's own binding."""

from __future__ import annotations

import pynvml


def look():
    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            mig = pynvml.nvmlDeviceGetMigMode(handle)[0]
        except pynvml.NVMLError_NotSupported:
            mig = None
        found.append(
            {
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
                "name": pynvml.nvmlDeviceGetName(handle),
                "capability": pynvml.nvmlDeviceGetCudaComputeCapability(handle),
                "memory": [memory.total, memory.free, memory.used],
                "mode": pynvml.nvmlDeviceGetComputeMode(handle),
                "mig": mig,
                "bus": pynvml.nvmlDeviceGetPciInfo(handle).busId,
                "processes": [[p.pid, p.usedGpuMemory] for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
                "migs": [
                    pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))
                    for i in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))
                    if i < 2 and mig
                ],
            }
        )
    return found
