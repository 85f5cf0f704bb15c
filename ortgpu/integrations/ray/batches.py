"""Batch inference with Ray Data."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray.data

from ...errors import GPUError
from .workers import open_session

if TYPE_CHECKING:
    from ...session.gpu_session import GPUSession


class RayGPUSession:
    """A callable class for ``ray.data.Dataset.map_batches``, with a session in each actor on its assigned GPU.

        dataset.map_batches(
            RayGPUSession,
            fn_constructor_args=("model.onnx",),
            compute=ray.data.ActorPoolStrategy(size=2),
            num_gpus=1,
            batch_size=256,
        )

    The arguments are those of :func:`~ortgpu.integrations.ray.open_session`. Each actor opens a path on its own node.
    Bytes go to the object store once, whatever the number of actors.

    The first batch opens the session, not the constructor, so that an error keeps its type on the way to the driver,
    which consumes the dataset. (Ray Data logs it as an error of its own code; it is not.) Each actor takes one of Ray's
    CPUs beside its GPU, unless ``num_cpus=0`` is set. Tasks that read data take one too. If no CPU is left for them,
    Ray Data waits forever.

    A subclass may prepare batches around ``super().__call__``.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._arguments, self._settings = arguments, settings
        self._session: GPUSession | None = None
        self._lock = threading.Lock()  # ActorPoolStrategy(enable_true_multi_threading=True) calls from many threads

    @property
    def session(self) -> GPUSession:
        """The session, opened at first use. Raises the errors of :func:`~ortgpu.integrations.ray.open_session`."""
        with self._lock:
            if self._session is None:
                self._session = open_session(*self._arguments, **self._settings)
            return self._session

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of the model by name, with the columns of ``batch`` that are not inputs.

        Args:
            batch: arrays by column, in Ray Data's default batch format "numpy". Each input of the model is the column
                of that name. The first axis counts the rows.

        Raises:
            GPUError: the session cannot be opened, or failed.
            ValueError: an output has the name of a column that is kept.
            Exception: ONNX Runtime's own, if a column is missing or has the wrong type.
        """
        try:
            session = self.session
            inputs = {entry.name for entry in session.get_inputs()}
            kept = {name: column for name, column in batch.items() if name not in inputs}
            names = [entry.name for entry in session.get_outputs()]
            twice = sorted(set(kept) & set(names))
            if twice:
                raise ValueError(
                    f"outputs of the model and columns of the batch have the same name: {', '.join(twice)}"
                )
            feed = {name: column for name, column in batch.items() if name in inputs}
            return {**kept, **dict(zip(names, session.run(names, feed), strict=True))}
        except GPUError:
            # Otherwise Ray Data wraps it in a UserCodeException, which loses its cause on the way to the driver.
            ray.data.DataContext.get_current().raise_original_map_exception = True
            raise
