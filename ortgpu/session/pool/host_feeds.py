"""Feeds for sessions in other processes. Several threads copy the arrays of numbers on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...environment.packages.installed import locate_packages
from ...errors import ProviderRequestError, manual
from ...process.background import cached_property
from ...provider.runtime import load_runtime
from ...running.pinned import OrdinaryMemory
from ...running.pipeline import mapping
from .workers import Feeds

if TYPE_CHECKING:
    from ...running.copying import ParallelCopy

_HOST = 1, 3  # DLDeviceType: kDLCPU, kDLCUDAHost
_NO_DEVICE = -1  # These copying threads belong to no device.


class ProcessFeeds(Feeds):
    """Copies arrays of the host. Several threads copy a large array into reused memory. Threads may share the object.

    ``limit`` is the most bytes to keep for later copies.
    """

    def __init__(self, limit: int) -> None:
        self._memory = OrdinaryMemory(limit)

    def pass_through(self, feed: Any) -> dict[str, NDArray[Any]]:
        return {name: _host_array(name, value) for name, value in mapping(feed).items()}

    def copied(self, feed: Any, waits: Iterable[Callable[[], object]] = ()) -> tuple[Any, bool]:
        return {name: self.copy_of(array) for name, array in self.pass_through(feed).items()}, True

    def copy_of(self, array: NDArray[Any]) -> NDArray[Any]:
        if array.nbytes < self.large:
            return array.copy()
        copy = self._memory.empty(array.shape, array.dtype)
        self.fill(copy, array)
        return copy

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return self._memory.empty(shape, dtype)

    def close(self) -> None:
        self._memory.close()

    @cached_property
    def _threads(self) -> ParallelCopy | None:
        arrival = locate_packages().onnxruntime.arrival
        if arrival is not None and arrival.way == "bundled plugin":
            return None  # Importing the plugin may use CUDA, and the program must be able to fork.
        if load_runtime().module is None:
            return None
        try:
            from ...running.copying import copy_threads, parallel_copy  # Import it late: it imports ONNX Runtime.
        except (ImportError, OSError):  # too many files are open
            return None
        return parallel_copy(copy_threads(), _NO_DEVICE)


def _host_array(name: str, value: Any) -> NDArray[Any]:
    """Return a NumPy array over the memory of a value.

    Raises ProviderRequestError if it is no array of numbers on the host.
    """
    if isinstance(value, np.ndarray):
        if not value.dtype.hasobject and value.dtype.kind not in "SU":
            return np.asarray(value)  # A subclass may copy differently.
        what = "text"
    elif hasattr(value, "__dlpack_device__") and type(value).__module__.partition(".")[0] != "onnxruntime":
        if int(value.__dlpack_device__()[0]) in _HOST:
            return np.from_dlpack(value)
        what = "on a GPU"
    else:
        what = f"a {type(value).__name__}"
    raise ProviderRequestError(
        f"input {name!r} is {what}, and a pool with isolate=True takes arrays of numbers on the host",
        fixes=[manual("pass a NumPy array of numbers, or use a pool without isolate, or a GPUSession")],
        requested="isolate",
    )
