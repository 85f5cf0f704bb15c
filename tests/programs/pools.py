"""What programs with a GPUSessionPool on the CPU share: see tests/support/pool_child.py."""

import dataclasses
import gc
import itertools
import logging
import os
import pickle
import signal
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import CancelledError, Future, wait

import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as C

import ortgpu
from ortgpu import GPUError, GPUSessionPool
from ortgpu.diagnosis.probe.probing import RELU
from ortgpu.provider import lifetime
from tests.support.children import report

warnings.simplefilter("ignore")


def open_pool(devices=2, **options):
    made = GPUSessionPool(RELU, range(devices), allow_cpu=True, **options)
    for session in made.sessions:
        session.device = dataclasses.replace(session.device, kind="cuda", ordinal=0, name=None)
    return made


def feed(value):
    return {"x": np.full(4, value, dtype=np.float32)}


def value_of(outputs):
    return outputs[0].tolist()[0]


def outcome(action):
    try:
        return {"returned": action()}
    except BaseException as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "details": getattr(error, "details", dict)(),
            "others": [type(other).__name__ for other in getattr(error, "others", ())],
        }


lock = threading.Lock()


class Watched:
    """Before a session's C++ session: counts the calls, and does something first."""

    def __init__(self, session, first=lambda: None):
        self._inner, self.first, self.calls, self.at_once, self.most = session._sess, first, 0, 0, 0
        session._sess = self

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def run(self, *arguments):
        with lock:
            self.calls += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        try:
            self.first()
            return self._inner.run(*arguments)
        finally:
            with lock:
                self.at_once -= 1


class Gate:
    """Holds every run until it is opened, and says how many it holds."""

    def __init__(self):
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()

    def __call__(self):
        self.arrived.release()
        assert self.opened.wait(30)

    def wait_for(self, count):
        for _ in range(count):
            assert self.arrived.acquire(timeout=30)


def raising(kind, text):
    def first():
        raise kind(text)

    return first


def pool_threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ortgpu-pool"))


WHERE = " ; GPU=1 ; hostname=vm ; file=/onnxruntime_src/x.cc ; line=91 ; expr=cudaMemcpyAsync(...); "
FAIL = "[ONNXRuntimeError] : 1 : FAIL : "
ECC = (C.Fail, FAIL + "CUDA failure 214: uncorrectable ECC error encountered" + WHERE)
UNKNOWN = (RuntimeError, "CudaCall CUDA failure 999: unknown error" + WHERE)
STICKY = (C.Fail, FAIL + "CUDA failure 700: an illegal memory access was encountered" + WHERE)
CUDNN = (C.Fail, FAIL + "CUDNN failure 4000: CUDNN_STATUS_INTERNAL_ERROR" + WHERE)
MEMORY = (C.Fail, FAIL + "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 99999")
