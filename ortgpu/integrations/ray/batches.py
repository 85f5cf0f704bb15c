"""Batch inference: the class that Ray Data keeps in each of its actors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray.data

from ...errors import GPUError
from .workers import open_session

if TYPE_CHECKING:
    from ...session.gpu_session import GPUSession


class RayGPUSession:
    """A model for ``ray.data.Dataset.map_batches``: a session in each actor, on the GPU that Ray assigned to it.

        dataset.map_batches(
            RayGPUSession,
            fn_constructor_args=("model.onnx",),
            compute=ray.data.ActorPoolStrategy(size=2),
            num_gpus=1,
            batch_size=256,
        )

    Arguments are those of :func:`~ortgpu.integrations.ray.open_session`. A path is opened by the actor, on its node.
    Bytes go to the object store once, with the rest of what Ray Data sends to its actors, whatever their number.

    The session is opened by the first batch, not by the constructor: what is raised there reaches the driver, which
    consumes the dataset, as itself. (Ray Data logs it as an error of its own code on the way; it is not.) Each actor
    takes a CPU of Ray's count beside its GPU, unless ``num_cpus=0`` is said, and tasks that read take one too: where
    none is left for them Ray Data waits for ever.

    A subclass may prepare batches around ``super().__call__``.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: Any | Callable[[], Any] = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **settings: Any,
    ) -> None:
        self._arguments = (path_or_bytes, sess_options, providers, provider_options)
        self._settings = settings
        self._session: GPUSession | None = None
        self._lock = threading.Lock()  # ActorPoolStrategy(enable_true_multi_threading=True) calls from many threads

    @property
    def session(self) -> GPUSession:
        """Opened when it is first asked for. Raises as :func:`~ortgpu.integrations.ray.open_session`."""
        with self._lock:
            if self._session is None:
                self._session = open_session(*self._arguments, **self._settings)
            return self._session

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs of the model by name, beside the columns of ``batch`` that are no input of it.

        Args:
            batch: arrays by column, in Ray Data's batch format "numpy", which is its default. The inputs of the model
                are the columns of their names; the first axis counts the rows.

        Raises:
            GPUError: the session cannot be opened, or failed.
            ValueError: an output has the name of a column that is kept.
            Exception: ONNX Runtime's own, for a column that is missing or of the wrong type.
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
            # Else Ray Data wraps it into a UserCodeException, which loses its cause on the way to the driver.
            ray.data.DataContext.get_current().raise_original_map_exception = True
            raise
