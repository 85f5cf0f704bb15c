"""Runs of sessions that have one CUDA stream for all runs.

ONNX Runtime makes the session's device the current one of a thread when it creates the streams of a run. With one
stream for all runs it creates none. Then a run fails in a thread whose current device is another GPU: cuDNN reports
CUDNN_STATUS_EXECUTION_FAILED (1.31.1, two H200s). So each run of such a session sets the device first. It stays set, as
after any run of ONNX Runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..provider.requests import CUDA
from ..provider.settings import CAPTURE, ONE_STREAM
from .cudart import device_setter
from .onnxruntimes import InferenceSession, Results
from .plain_runs import PlainRunner
from .turns import combined

if TYPE_CHECKING:
    from ..provider.devices import Device
    from .plain_runs import RunningSession

# Each of these options of the CUDA provider makes all runs use one stream.
_ONE_STREAM = (ONE_STREAM, CAPTURE, "user_compute_stream", "gpu_external_alloc")


class _OnDevice(PlainRunner):
    _run_on_device: Callable[..., Results]  # ``run`` of the class behind this one
    use_device: Callable[[], None]

    def run(self, session: RunningSession, output_names: Any, feed: Any, run_options: Any) -> Results:
        self.use_device()
        return self._run_on_device(session, output_names, feed, run_options)

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._call, super().around(method))

    def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.use_device()
        return method(*arguments, **named)


def set_device_in_runs(session: RunningSession, runner: PlainRunner, device: Device) -> None:
    """Have the runs of a session set its device, if ONNX Runtime does not: if the session has one stream."""
    options = InferenceSession.get_provider_options(session).get(CUDA, {})
    if all(options.get(name, "0") in ("", "0") for name in _ONE_STREAM):
        return
    use_device = device_setter(device)
    if use_device is not None:
        runner.__class__ = combined(_OnDevice, type(runner), "_run_on_device")
        vars(runner).update(use_device=use_device, binds_directly=False)
