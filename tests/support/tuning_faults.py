"""Openers of sessions for ``tune``, with the CPU in the place of a GPU: candidates that are faster, or at fault.

A child of ``tune`` imports this module, since the functions are among its arguments.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import onnx
from onnx import numpy_helper
from onnxruntime import InferenceSession

from ortgpu.provider.settings import Settings
from ortgpu.session.tuning.children import Place
from ortgpu.session.tuning.trial import open_session

_SLOW, _FAST = 0.03, 0.003  # seconds of a run, far apart: tests share their cores
_at_work = threading.Semaphore(1)


class _Timed(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
    """A session whose runs take a known time, or that spoils a result when two runs are at work."""

    seconds = _SLOW
    races = False
    sound_runs = -1  # with fixed memory; then one result is spoilt

    def run(self, *arguments: Any) -> Any:
        alone = _at_work.acquire(blocking=False)
        try:
            time.sleep(self.seconds)
            results = super().run(*arguments)
            if self.races and not alone and results[0].dtype.kind == "f":
                results[0][..., -1] += 1 + abs(results[0]).max()
            return results
        finally:
            if alone:
                _at_work.release()

    def run_with_iobinding(self, *arguments: Any) -> None:
        time.sleep(self.seconds)
        super().run_with_iobinding(*arguments)
        if self.sound_runs == 0:
            (value,) = arguments[0].get_outputs()
            value.update_inplace(value.numpy() + 1)
        self.sound_runs -= 1


def _timed(session: Any, seconds: float, *, races: bool = False) -> Any:
    session.__class__ = _Timed
    session.seconds, session.races = seconds, races
    return session


def open_well(model: str | bytes, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    """Open a session that is fast with workspace small, and nothing else."""
    session = open_session(model, settings, place, dimensions)
    is_fast = settings.get("workspace") == "small"
    return _timed(session, _FAST if is_fast else _SLOW)


def open_hopeless(model: str | bytes, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    """Open a session that is ten times as slow with search exhaustive, and otherwise fast with workspace small."""
    session = open_well(model, settings, place, dimensions)
    if settings.get("search") == "exhaustive":
        session.seconds = 10 * _SLOW
    return session


def open_faulty(model: str | bytes, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    """Open a session that is right and slow if it is plain or has search heuristic, and else fast and at fault."""
    if settings.get("layout") == "channels-last" or settings.get("precision") == "float16":
        return _timed(open_session(_with_a_wrong_channel(model), {}, place, {}), _FAST)
    session = open_session(model, settings, place, dimensions)
    if settings.get("layout") == "channels-last, biases fused":
        return _timed(session, _FAST, races=True)
    if settings.get("workspace") == "small":
        os.kill(os.getpid(), signal.SIGABRT)
    if settings.get("search") == "exhaustive":
        time.sleep(600)
    return _timed(session, 0.8 * _SLOW if settings else _SLOW)  # else plain, which search exhaustive is, may be kept


def open_vanishing(model: str | bytes, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    """Open a session with faults that do not show where tensors are exposed, for which a model is bytes.

    It is wrong with one layout, and in its sixth timed run with another.
    """
    layout = settings.get("layout", "") if not isinstance(model, bytes) else ""
    session = open_faulty(model, {"layout": layout} if layout == "channels-last" else {}, place, {})
    session.sound_runs = 8 if layout == "channels-last, biases fused" else -1
    return session


class _TimedByBatch(_Timed):
    """A session whose runs take a time for each batch."""

    batches: ClassVar[Mapping[int, float]] = {}

    def run_with_iobinding(self, *arguments: Any) -> None:
        self.seconds = self.batches[arguments[0].get_outputs()[0].shape()[0]]
        super().run_with_iobinding(*arguments)


def open_by_batch(model: Any, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    """Open a session that is the fastest of all for one item with one setting, and for four items with another.

    A third setting is best over both: it halves each time.
    """
    session = open_session(model, settings, place, dimensions)
    session.__class__ = _TimedByBatch
    seconds = {"small": (_FAST, 4 * _SLOW), "channels-last, biases fused": (4 * _SLOW, _FAST)}
    halved = (_SLOW / 2, _SLOW / 2) if settings.get("layout") == "channels-last" else (_SLOW, _SLOW)
    one, four = next((seconds[value] for value in settings.values() if value in seconds), halved)
    session.batches = {1: one, 4: four}
    return session


def open_exhaustive_hangs(model: Any, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    """Open a session that is a little slower than plain with search heuristic; with search exhaustive, never return."""
    if settings.get("search") == "exhaustive":
        time.sleep(600)
    return _timed(open_session(model, settings, place, dimensions), 1.5 * _SLOW if settings else _SLOW)


def open_all_hang(model: Any, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    if settings:
        time.sleep(600)
    return open_session(model, settings, place, dimensions)


def open_planted(model: str | bytes, settings: Settings, place: Place, dimensions: Mapping[str, int]) -> Any:
    """Open a session on a GPU that is at fault with these layouts, and with workspace small."""
    if settings.get("layout") == "channels-last":
        return open_session(_with_a_wrong_channel(model, -1), {"search": "heuristic"}, place, dimensions)
    if settings.get("layout") == "channels-last, biases fused":  # without the layout: 1.31 computes it wrongly
        found = InferenceSession(model, providers=[("CUDAExecutionProvider", {"fuse_conv_bias": "1"})])
        return _timed(found, 0, races=place.ordinal is None)
    session = open_session(model, settings, place, dimensions)
    return _timed(session, 0, races=True) if settings.get("workspace") == "small" else session


def _with_a_wrong_channel(model: str | bytes, at: int = 2) -> bytes:
    """Return the model with one output channel of a convolution doubled.

    TF32 hides that of an early one where many layers follow.
    """
    found = onnx.load_model_from_string(model) if isinstance(model, bytes) else onnx.load(model)
    convolution = [node for node in found.graph.node if node.op_type == "Conv"][at]
    weights = next(each for each in found.graph.initializer if each.name == convolution.input[1])
    array = numpy_helper.to_array(weights).copy()
    array[1] *= 2
    weights.CopyFrom(numpy_helper.from_array(array, weights.name))
    return bytes(found.SerializeToString())


CPU = Place(ordinal=None, opener=open_well)
HOPELESS = Place(ordinal=None, opener=open_hopeless)
FAULTY = Place(ordinal=None, opener=open_faulty)
VANISHING = Place(ordinal=None, opener=open_vanishing)
