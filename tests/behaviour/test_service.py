"""The example of a web service, over real HTTP: under uvicorn, and under gunicorn --preload. On the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import onnx.parser
import pytest

from tests.behaviour.test_examples import EXAMPLES, MODEL

_PACKAGES = ("fastapi", "uvicorn", "gunicorn", "uvicorn_worker")
_MISSING = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(bool(_MISSING), reason=f"of the extra test, and not installed: {', '.join(_MISSING)}"),
]

DEADLINE = 60.0  # seconds
SERVERS = {
    "uvicorn": ["uvicorn", "--host", "127.0.0.1", "--port", "{port}"],
    "gunicorn": ["gunicorn", "--preload", "--worker-class", "uvicorn_worker.UvicornWorker", "--bind",
                 "127.0.0.1:{port}"],
}  # fmt: skip
TWO_WORKERS = {"WEB_CONCURRENCY": "2"}  # of gunicorn; uvicorn would start processes of its own

# The service as its user has it, with a GPU that is lost at the request [[1, 2, 3, 999]].
LOST = """
from ortgpu import GPUSession, PoisonedContextError
from service import app

def run(self, output_names, input_feed, run_options=None, original=GPUSession.run):
    if input_feed["x"].max() == 999:
        raise PoisonedContextError("an illegal memory access was encountered")
    return original(self, output_names, input_feed, run_options)

GPUSession.run = run
"""


class Service:
    """A server that runs, and its log."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self._port, self._log = process, port, log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def ask(self, path: str, content: Any = None) -> tuple[int, Any]:
        """Return the status and the document of a request; 0 and None where nobody answers."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, None

    def wait_for(self, happened: Callable[[], bool], seconds: float = DEADLINE) -> None:
        until = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < until, self.log
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served_by(command: Sequence[str], port: int, folder: Path, variables: Mapping[str, str]) -> Iterator[Service]:
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=file, stderr=file, start_new_session=True)
    try:
        yield Service(process, port, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def served(server: str, folder: Path, app: str = "service:app", **variables: str) -> AbstractContextManager[Service]:
    """Serve the example on a machine that shows no GPU."""
    port = free_port()
    (folder / "model.onnx").write_bytes(onnx.parser.parse_model(MODEL).SerializeToString())
    given = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ORTGPU_")},
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(folder), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]),
        "HOME": str(folder),  # where gunicorn has a socket
        **variables,
    }
    command = [sys.executable, "-m", *(part.format(port=port) for part in SERVERS[server]), app]
    return served_by(command, port, folder, given)


@pytest.mark.parametrize("server", SERVERS)
def test_a_service_answers(server: str, tmp_path: Path) -> None:
    with served(server, tmp_path, ORTGPU_ALLOW_CPU="1") as service:
        service.wait_for(lambda: service.ask("/ready")[0] == 200)
        assert service.ask("/health") == (200, {"status": "alive"})
        assert service.ask("/ready") == (200, {"status": "ready", "device": "cpu"})
        assert service.ask("/predict", [[-1, 2, -3, 4]]) == (200, [[0, 2, 0, 4]])
        for wrong in ([[1, 2], [3]], [[1, 2, 3]]):
            status, document = service.ask("/predict", wrong)
            assert status == 422, document
        assert "runs on the CPU, which was allowed" in service.log
        assert "ready: <GPUSession of model.onnx on cpu [CPUExecutionProvider]>" in service.log
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(DEADLINE) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("server", SERVERS)
def test_a_service_without_a_gpu_ends_with_the_cause(server: str, tmp_path: Path) -> None:
    with served(server, tmp_path) as service:
        assert service.process.wait(DEADLINE) == 3, service.log
        assert service.ask("/health") == (0, None)
    assert service.log.count("To fix it:") == 1
    assert "More: ortgpu explain" in service.log
    assert "Traceback" not in service.log


def test_gunicorn_ends_with_all_its_workers(tmp_path: Path) -> None:
    """Where a second worker ends while gunicorn does, gunicorn 27 shows its own exception and ends with 1."""
    with served("gunicorn", tmp_path, **TWO_WORKERS) as service:
        assert service.process.wait(DEADLINE) in (1, 3), service.log
    assert "To fix it:" in service.log


@pytest.mark.parametrize("server", SERVERS)
def test_a_process_that_lost_the_gpu_ends_and_gunicorn_starts_another(server: str, tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(LOST, encoding="utf-8")
    variables = {} if server == "uvicorn" else TWO_WORKERS
    with served(server, tmp_path, "lost:app", ORTGPU_ALLOW_CPU="1", **variables) as service:
        service.wait_for(lambda: service.log.count("ready: <GPUSession") == (2 if variables else 1))
        service.wait_for(lambda: service.ask("/ready")[0] == 200)
        status, document = service.ask("/predict", [[1, 2, 3, 999]])
        assert status == 503
        assert "illegal memory access" in document["detail"]
        if server == "uvicorn":
            assert service.process.wait(DEADLINE) in (0, -signal.SIGTERM)
        else:
            service.wait_for(lambda: service.log.count("ready: <GPUSession") == 3)
            assert service.process.poll() is None
            assert service.ask("/predict", [[-1, 2, -3, 4]]) == (200, [[0, 2, 0, 4]])
