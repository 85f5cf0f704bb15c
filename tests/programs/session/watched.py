"""ONNX Runtime's constructor is watched, and goes on on the CPU: what is asked of CUDA's provider."""

from __future__ import annotations

import sys

import onnxruntime

import ortgpu
from tests.lab.probe import describe

MODEL = sys.argv[1]
given, refusals = [], []
construct = onnxruntime.InferenceSession.__init__


def watched(self, model, options=None, providers=None, provider_options=None, **others):
    given.append(dict(providers)["CUDAExecutionProvider"])
    if refusals:
        raise RuntimeError(refusals.pop())
    construct(self, model, options, providers=["CPUExecutionProvider"], **others)


onnxruntime.InferenceSession.__init__ = watched


def ask(providers=None, provider_options=None, **others):
    given.clear()
    try:
        ortgpu.GPUSession(MODEL, None, providers, provider_options, **others)
    except ortgpu.GPUError as error:
        return [list(given), describe(error)]
