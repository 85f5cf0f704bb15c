"""What the programs of ``tests/provider/test_contexts.py`` share."""

# ruff: noqa: F401 - for code that runs behind it

from __future__ import annotations

import os
import sys

from ortgpu.environment.gpu.cuda import context_id, initialise
from ortgpu.provider import lifetime
from ortgpu.provider.devices import Device
from ortgpu.running.pinned import PinnedMemory
from tests.programs.on_cpu import stub_runtime

assert initialise().code == 0
runtime, stub = stub_runtime(sys.argv[1])


def reset(context):
    os.environ["STUB_CUDA_CONTEXT"] = str(context)


class Session:
    def __init__(self):
        self.device, self._sess = Device("cuda", 0, None, None, None, None, None), object()


session, other = Session(), Session()
