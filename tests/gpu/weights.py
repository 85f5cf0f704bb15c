"""Programs about sessions whose weights are read past ONNX Runtime's parser; see programs.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.workers import plain_session
from tests.gpu.programs import attempt, random_feed


def bytes_read() -> int:
    """By calls of this process, as a mapping is not."""
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("rchar:") + 1])


def reading(action: Callable[[], Any]) -> tuple[Any, int]:
    before = bytes_read()
    return action(), bytes_read() - before


def weights_in_memory(model: str, folder: str) -> None:
    """A session of a file that is overwritten afterwards, one of its bytes, and one that ONNX Runtime reads."""
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSession

    path = Path(shutil.copy(model, folder))
    content = path.read_bytes()
    by_itself, size = reading(lambda: GPUSession(path, onnxruntime.SessionOptions()))
    feed = random_feed(by_itself, 4)
    right = by_itself.run(None, feed)
    session, mapped = reading(lambda: GPUSession(path))
    report("read", {"file": len(content), "by ONNX Runtime": size, "by ours": mapped})
    report("mapped", path.name in Path("/proc/self/maps").read_text())
    report("chosen alike", session.options_chosen == by_itself.options_chosen)
    report("nodes alike", session.placement.nodes == by_itself.placement.nodes)
    of_bytes = GPUSession(content)
    report("kept", [session._model_path == str(path), session._model_bytes, of_bytes._model_bytes == content])
    path.write_bytes(bytes(len(content)))
    found = {"path": session.run(None, feed), "bytes": of_bytes.run(None, feed)}
    report("equal", {name: all(map(np.array_equal, results, right)) for name, results in found.items()})


def weights_that_do_not_fit(folder: str) -> None:
    """What ours and plain ONNX Runtime raise for the same file."""
    from ortgpu import GPUSession
    from tests.test_weights import too_short_for_its_shape

    path = Path(folder) / "model.onnx"
    path.write_bytes(too_short_for_its_shape())
    attempt("ours", lambda: GPUSession(path))
    attempt("plain", lambda: plain_session(str(path)))


PROGRAMS: dict[str, Callable[..., None]] = {
    "weights_in_memory": weights_in_memory,
    "weights_that_do_not_fit": weights_that_do_not_fit,
}
