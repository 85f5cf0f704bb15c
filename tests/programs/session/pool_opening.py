"""Programs of ``tests/session/test_pool_opening.py``."""

from __future__ import annotations

import gc
import threading
import warnings

import ortgpu
from ortgpu import GPUSessionPool
from ortgpu.diagnosis.probe.probing import RELU
from tests.programs.pools import outcome, pool_threads
from tests.support.children import report


def without_a_gpu_the_cause_is_raised_once_and_nothing_is_left() -> None:
    report("all", outcome(lambda: GPUSessionPool(RELU)))
    report("two", outcome(lambda: GPUSessionPool(RELU, [0, 1])))
    report("no model", outcome(lambda: GPUSessionPool("no/such/model.onnx", [0, 1], allow_cpu=True)))
    report("left", [pool_threads(), len(ortgpu.sessions()), threading.active_count()])


def allow_cpu_warns_the_caller_of_each_session() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with GPUSessionPool(RELU, [0, 1], allow_cpu=True) as made:
            report("devices", [str(device) for device in made.devices])
            report("created by", [record.created_by.partition(" ")[0] for record in ortgpu.sessions()])
    report("warned", [[type(each.message).__name__, each.filename] for each in caught])


def a_session_that_cannot_be_opened_closes_the_others() -> None:
    warned = []

    def show(message, *_):
        warned.append(message)
        if len(warned) == 3:
            raise message

    warnings.simplefilter("always")
    warnings.showwarning = show
    report("raised", outcome(lambda: GPUSessionPool(RELU, range(4), allow_cpu=True)))
    gc.collect()
    report("left", [pool_threads(), len(ortgpu.sessions()), len(warned)])
