"""Plain ONNX Runtime with a model, observed in a child process with a deadline."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ortgpu.environment.child import run_python, signal_name
from ortgpu.model.files import write_temporary
from ortgpu.provider.requests import CPU, CUDA

REQUEST = (CUDA, CPU)

# The usual program. It reports through a file, because what ONNX Runtime writes to stdout and stderr is observed too.
_PROGRAM = """\
import json
from pathlib import Path

model, batch, width, providers, result = json.loads(sys.argv[1])
observed = {}
try:
    import numpy, onnxruntime
    observed["version"] = onnxruntime.__version__
    session = onnxruntime.InferenceSession(model, providers=providers)
    observed["bound"] = session.get_providers()
    observed["outputs"] = len(session.run(None, {"input": numpy.ones((batch, width), numpy.float32)}))
except Exception as error:
    observed["raised"] = f"{type(error).__name__}: {error}"
Path(result).write_text(json.dumps(observed))
"""


@dataclass(frozen=True, slots=True)
class PlainResult:
    """The observation of plain ONNX Runtime. A field is None if the program did not get that far."""

    version: str | None
    bound: tuple[str, ...] | None  # session.get_providers()
    ran: bool  # run() returned a result
    raised: str | None
    ended: str | None  # the signal or deadline that ended the process, if any
    written: tuple[str, ...]  # lines on stdout and stderr

    @property
    def got_gpu(self) -> bool:
        return self.bound is not None and self.bound[:1] == REQUEST[:1]


def observe(model: bytes, batch: int, width: int, *, timeout: float) -> PlainResult:
    """Create an ``InferenceSession`` that asks for CUDA first and run it once, as most programs do."""
    with tempfile.TemporaryDirectory(prefix="ortgpu-demo-") as folder:
        path, result = (Path(folder) / name for name in ("model.onnx", "result.json"))
        write_temporary(path, model)
        request = json.dumps([str(path), batch, width, REQUEST, str(result)])
        environ = {name: value for name, value in os.environ.items() if name != "ORTGPU_ENFORCE"}
        ended = None
        child = run_python(_PROGRAM, request, timeout=timeout, environ=environ, together=True)
        if child.returncode is None:
            ended = f"did not end within {timeout:.0f} s" if child.timed_out else child.errors
        elif child.returncode < 0:
            ended = f"died of {signal_name(-child.returncode)}"
        observed = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    return PlainResult(
        version=observed.get("version"),
        bound=tuple(observed["bound"]) if "bound" in observed else None,
        ran="outputs" in observed,
        raised=observed.get("raised"),
        ended=ended,
        written=_lines(child.output),
    )


def _lines(text: str) -> tuple[str, ...]:
    """Return the lines without colours, which ONNX Runtime's log has even without a terminal."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return tuple(line.rstrip() for line in plain.splitlines() if line.strip())
