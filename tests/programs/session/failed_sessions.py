"""Programs of ``tests/session/test_failed_sessions.py``."""

from __future__ import annotations

import gc
import os
import traceback
import warnings
import weakref

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

import ortgpu
from ortgpu.diagnosis.probe.probing import RELU

warnings.simplefilter("ignore")
gc.disable()


class Mine:
    pass


def natives_in(error):
    tracebacks = error.__traceback__.tb_next, error.__cause__ and error.__cause__.__traceback__
    frames = [frame for each in tracebacks for frame, _ in traceback.walk_tb(each)]
    values = [value for frame in frames for value in frame.f_locals.values()]
    return sum(isinstance(value, native.InferenceSession) for value in values)


def attempt(action):
    mine = Mine()
    try:
        action()
    except ortgpu.GPUError as error:
        found = [type(error).__name__, natives_in(error)]
    return weakref.ref(mine), found


def guarded():
    with ortgpu.enforce():
        onnxruntime.InferenceSession(RELU)


def no_longer_allowed():
    os.environ["ORTGPU_ALLOW_CPU"] = "1"
    session = ortgpu.GPUSession(RELU, allow_cpu=None)
    del os.environ["ORTGPU_ALLOW_CPU"]
    session.set_providers()
