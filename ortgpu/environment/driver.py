"""Facts about the NVIDIA driver and its GPUs. Nothing here initialises CUDA or creates a context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU as NVML reports it: every GPU of the machine, whatever CUDA_VISIBLE_DEVICES says."""

    index: int  # NVML's index (PCI bus order), which is not CUDA's ordinal
    uuid: str | None  # "GPU-..."
    name: str | None
    compute_capability: tuple[int, int] | None
    memory_total: int | None  # bytes
    memory_free: int | None  # bytes, when it was read
    compute_mode: str | None  # "default", "exclusive-process", "prohibited", "exclusive-thread"
    mig_enabled: bool | None
    mig_uuids: tuple[str, ...]  # "MIG-..." of its instances
    pci_bus_id: str | None


@dataclass(frozen=True, slots=True)
class Nvml:
    """What NVML says. ``available`` False with ``error`` is one fact, a machine without GPUs another."""

    available: bool
    error: str | None  # why not available, in NVML's words or the loader's
    driver_version: str | None  # "580.159.04"
    cuda_version: tuple[int, int] | None  # newest CUDA that the driver supports
    gpus: tuple[GPU, ...]


@dataclass(frozen=True, slots=True)
class Driver:
    libcuda: str | None  # path of the libcuda.so.1 that the loader gives; None: it cannot be loaded
    libcuda_error: str | None  # the loader's words when it cannot
    cuda_version: tuple[int, int] | None  # cuDriverGetVersion, which needs no initialisation
    kernel_version: str | None  # /proc/driver/nvidia/version: the kernel module's
    device_nodes: tuple[str, ...]  # /dev/nvidia*, /dev/dxg
    nvml: Nvml
