"""Programs about sessions whose weights go past ONNX Runtime's parser; see programs.py."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.programs import attempt, random_feed
from tests.support.children import report
from tests.support.plain_session import plain_session


def weights_in_place(model: str, folder: str) -> None:
    """A session of a file that is cut short afterwards, one of its bytes, and one that ONNX Runtime reads."""
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSession
    from ortgpu.provider.settings import THREADS
    from ortgpu.session import opening, weights

    weights._FEWEST_BYTES = 8 << 20  # smaller networks show the same
    made: list[Any] = []
    plain = weights.weights_in_place

    def watched(model: Any) -> Any:
        made.append(plain(model))
        return made[-1]

    opening.weights_in_place = watched  # type: ignore[attr-defined, assignment]  # its own name for it
    path = Path(folder) / "copy-of-a-model.onnx"
    shutil.copy(model, path)
    content = path.read_bytes()
    by_itself = GPUSession(path, onnxruntime.SessionOptions(), cpu_nodes="allow")
    feed = random_feed(by_itself, 4)
    right = by_itself.run(None, feed)
    session = GPUSession(path, cpu_nodes="allow")
    memory = made[0]._memory
    report("given back", memory[:].count(0) == len(content))
    chosen = {name: choice for name, choice in session.options_chosen.items() if name != THREADS}  # not beside options
    report("chosen alike", chosen == by_itself.options_chosen)
    report("nodes alike", session.placement.nodes == by_itself.placement.nodes)
    report("on the CPU", session.placement.operators_on("CPUExecutionProvider"))
    of_bytes = GPUSession(content, cpu_nodes="allow")
    report("kept", [session._model_path == str(path), session._model_bytes, of_bytes._model_bytes == content])
    os.truncate(path, 100)
    memory[:] = b"\xff" * len(content)
    found = {"path": session.run(None, feed), "bytes": of_bytes.run(None, feed)}
    report("equal", {name: all(map(np.array_equal, results, right)) for name, results in found.items()})
    memory = weakref.ref(memory)
    made.clear()
    session.close()
    gc.collect()
    report("memory after close", memory() is not None)


def weights_that_do_not_fit(folder: str) -> None:
    """What ours and plain ONNX Runtime raise for the same file."""
    from ortgpu import GPUSession
    from tests.session.test_weights import too_short_for_its_shape

    path = Path(folder) / "model.onnx"
    path.write_bytes(too_short_for_its_shape())
    attempt("ours", lambda: GPUSession(path))
    attempt("plain", lambda: plain_session(str(path)))


PROGRAMS: dict[str, Callable[..., None]] = {
    "weights_in_place": weights_in_place,
    "weights_that_do_not_fit": weights_that_do_not_fit,
}
