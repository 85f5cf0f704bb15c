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

_PACKAGES = ("fastapi", "uvicorn", "gunicorn", "uvicorn_worker", "prometheus_client")
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


class Service:
    """A server that runs, and its log."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self._port, self._log = process, port, log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def ask(self, path: str, content: Any = None) -> tuple[int, Any]:
        """Return the status and the document or text of a request; 0 and None where nobody answers."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                is_document = answer.headers.get_content_type() == "application/json"
                return answer.status, json.load(answer) if is_document else answer.read().decode()
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
        service.wait_for(lambda: service.ask("/readyz")[0] == 200)
        assert service.ask("/healthz") == (200, {"status": "alive"})
        (worker,) = service.ask("/readyz")[1]["workers"]
        assert (worker["device"], worker["state"], worker["restarts"]) == ("cpu", "ready", 0)
        assert service.ask("/predict", [[-1, 2, -3, 4]]) == (200, [[0, 2, 0, 4]])
        for wrong in ([[1, 2], [3]], [[1, 2, 3]]):
            status, document = service.ask("/predict", wrong)
            assert status == 422, document
        assert "is running on the CPU, as" in service.log
        assert "ready: cpu" in service.log
        status, metrics = service.ask("/metrics")
        assert status == 200
        for line in ('worker_ready{device="cpu",worker="0"} 1.0', "queued 0.0", "predict_seconds_count 3.0"):
            assert line in metrics, metrics
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(DEADLINE) in (0, -signal.SIGTERM)


def test_further_models_are_opened_at_their_first_request(tmp_path: Path) -> None:
    negating = '<ir_version: 8, opset_import: ["": 17]> neg (float[n, 2] x) => (float[n, 2] y) { y = Neg(x) }'
    folder = tmp_path / "further"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.onnx").write_bytes(onnx.parser.parse_model(negating).SerializeToString())
    with served("uvicorn", tmp_path, ORTGPU_ALLOW_CPU="1", MODELS=str(folder)) as service:
        service.wait_for(lambda: service.ask("/readyz")[0] == 200)
        assert service.ask("/readyz")[1]["models"] == []
        assert service.ask("/models/one/predict", [[1, -2]]) == (200, [[-1, 2]])
        assert service.ask("/models/one/predict", [[1, 2, 3]])[0] == 422
        (one,) = service.ask("/readyz")[1]["models"]
        assert (Path(one["model"]).name, one["state"], one["opened"]) == ("one.onnx", "open", 1)
        assert service.ask("/models/three/predict", [[1, 2]])[0] == 404
        assert service.ask("/predict", [[-1, 2, -3, 4]]) == (200, [[0, 2, 0, 4]])


@pytest.mark.parametrize("server", SERVERS)
def test_a_service_without_a_gpu_ends_with_the_cause(server: str, tmp_path: Path) -> None:
    with served(server, tmp_path) as service:
        assert service.process.wait(DEADLINE) == 3, service.log
        assert service.ask("/healthz") == (0, None)
    assert service.log.count("To fix it:") == 1
    assert "More: ortgpu explain" in service.log
    assert "Traceback" not in service.log


def test_gunicorn_ends_with_all_its_workers(tmp_path: Path) -> None:
    """Where a second worker ends while gunicorn does, gunicorn 27 shows its own exception and ends with 1."""
    with served("gunicorn", tmp_path, **TWO_WORKERS) as service:
        assert service.process.wait(DEADLINE) in (1, 3), service.log
    assert "To fix it:" in service.log


def test_a_worker_that_dies_is_replaced_and_the_service_goes_on(tmp_path: Path) -> None:
    with served("uvicorn", tmp_path, ORTGPU_ALLOW_CPU="1") as service:
        service.wait_for(lambda: service.ask("/readyz")[0] == 200)
        assert service.ask("/predict", [[-1, 2, -3, 4]]) == (200, [[0, 2, 0, 4]])
        (worker,) = service.ask("/readyz")[1]["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        assert service.ask("/predict", [[-1, 2, -3, 4]]) == (200, [[0, 2, 0, 4]])
        (successor,) = service.ask("/readyz")[1]["workers"]
        assert (successor["state"], successor["restarts"]) == ("ready", 1)
        assert successor["pid"] != worker["pid"]
        assert 'worker_restarts_total{worker="0"} 1.0' in service.ask("/metrics")[1]
        assert service.process.poll() is None
