"""What a program asks the lab's driver, by ctypes."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t

cu = ctypes.CDLL("libcuda.so.1")


def devices():
    count = c_int()
    state = cu.cuInit(0) or cu.cuDeviceGetCount(byref(count))
    if state:
        return state
    found = []
    for ordinal in range(count.value):
        name, uuid = ctypes.create_string_buffer(96), (ctypes.c_ubyte * 16)()
        major, minor, size = c_int(), c_int(), c_size_t()
        assert not cu.cuDeviceGetName(name, 96, ordinal)
        assert not cu.cuDeviceGetUuid_v2(uuid, ordinal)
        assert not cu.cuDeviceComputeCapability(byref(major), byref(minor), ordinal)
        assert not cu.cuDeviceTotalMem_v2(byref(size), ordinal)
        found.append([name.value.decode(), bytes(uuid).hex(), major.value, minor.value, size.value])
    return found
