"""A user's program in pyright and mypy, and in an editor, beside an editable and an ordinary installation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.behaviour.test_packaging import copied_to
from tests.lab.environments import call, kept_environment

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

# pyright comes with Node.js. onnxruntime is there as it is for a user: pyright reads its code, mypy wants types of it.
TOOLS = ("mypy==2.4.1", "pyright[nodejs]==1.1.414", "onnxruntime", "numpy")

PROGRAM = """\
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

import ortgpu
from ortgpu import Device, GPUError, GPUSession, GPUSessionPool, LibraryNotFoundError, diagnose


def scores(session: GPUSession, image: NDArray[np.float32]) -> NDArray[np.float32]:
    return session.run(["scores"], {"image": image})[0]


def best(session: GPUSession, image: NDArray[np.float32]) -> int:
    first, *_ = session.run(None, {"image": image})
    return int(first.argmax(axis=-1)[0])


def many(session: GPUSession, images: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([results[0] for results in session.map({"image": image} for image in images)])


def spread(pool: GPUSessionPool, image: NDArray[np.float32]) -> NDArray[np.float32]:
    later: Future[list[NDArray[np.float32]]] = pool.submit(None, {"image": image})
    return later.result()[0] + pool.run(None, {"image": image})[0]


def placed(session: GPUSession) -> str:
    device: Device = session.device
    chosen: list[str] = [f"{name}={value}" for name, (value, _) in session.options_chosen.items()]
    return f"{device} {session.placement.by_provider} {chosen}"


def opened(path: str) -> GPUSession:
    try:
        return GPUSession(path, device="cuda:0", cpu_nodes="forbid")
    except LibraryNotFoundError as error:
        missing: tuple[str, ...] = error.missing
        raise SystemExit(f"{error.code}: {missing}")
    except GPUError as error:
        problems: tuple[GPUError, ...] = diagnose(path).problems
        raise SystemExit(f"{error.summary}: {problems}")


def ranked(path: str, image: NDArray[np.float32]) -> str:
    session = GPUSession.for_rank(path, allow_cpu=False)
    return repr(session.run_on_device(None, {"image": image})[0].shape())


def gpus() -> int:
    return len(ortgpu.testing.find_gpus().gpus)
"""
MISTAKES = """\
from ortgpu import GPUModels, GPUSession, GPUSessionPool

session = GPUSession("model.onnx", device=1.5)
session = GPUSession("model.onnx", cpu_nodes="never")
text: str = session.run(None, {})[0]
session = GPUSession("model.onnx", devce="cuda:0")
session = GPUSession.for_rank("model.onnx", alow_cpu=True)
pool = GPUSessionPool("model.onnx", isolated=True)
models = GPUModels(budget="1GiB", devce="cuda:0")
"""


@pytest.fixture(scope="module", params=["editable", "ordinary"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a user, with the type checkers."""
    interpreter = kept_environment(f"editors-{request.param}", "\n".join(TOOLS), install_tools)
    source = copied_to(tmp_path_factory.mktemp("source"))
    how = ["-e", str(source)] if request.param == "editable" else [str(source)]
    call([str(interpreter), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", *how])
    return interpreter


def install_tools(python: Path) -> None:
    call([str(python), "-m", "pip", "install", "--quiet", *TOOLS])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def checked(python: Path, tool: str, path: Path) -> tuple[int, str]:
    """Return the exit status of a type checker in its strict mode, and what it prints."""
    (path.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}', encoding="utf-8")
    command = {
        "mypy": ["mypy", "--strict", "--no-error-summary", str(path)],
        "pyright": ["pyright", "--pythonpath", str(python), "--project", str(path.parent)],
    }[tool]
    done = subprocess.run(
        [str(python), "-m", *command], cwd=path.parent, capture_output=True, text=True, timeout=400, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_a_users_program_has_no_error(python: Path, tool: str, program: Path) -> None:
    status, printed = checked(python, tool, program)
    assert status == 0, printed


@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_a_users_mistakes_are_errors(python: Path, tool: str, tmp_path: Path) -> None:
    path = tmp_path / "mistakes.py"
    path.write_text(MISTAKES, encoding="utf-8")
    status, printed = checked(python, tool, path)
    assert status == 1, printed
    assert [line for line in (3, 4, 5, 6, 7, 8, 9) if f"mistakes.py:{line}" not in printed] == [], printed


def test_an_editor_shows_our_words(python: Path, program: Path) -> None:
    with Editor(python, program) as editor:
        constructor = editor.hover('GPUSession(path, device="cuda:0"')
        assert "Open a model on the GPU, and verify that it is there." in constructor
        assert "allow_cpu:" in constructor
        assert "default precedence" not in constructor, "those are ONNX Runtime's words"
        assert "The GPU that the session runs on" in editor.hover("device\n", after="session.")
        assert "Results" in editor.hover("run([", after="session.")


class Editor:
    """What an editor asks pyright's language server, about one file."""

    def __init__(self, python: Path, path: Path) -> None:
        self._text, self._uri, self._number = path.read_text(encoding="utf-8"), path.as_uri(), 0
        command = [str(python), "-m", "pyright.langserver", "--stdio"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=path.parent)
        self._settings = {"python": {"pythonPath": str(python)}}

    def __enter__(self) -> Editor:
        root = self._uri.rpartition("/")[0]
        hover = {"textDocument": {"hover": {"contentFormat": ["markdown"]}}, "workspace": {"configuration": True}}
        folders = [{"uri": root, "name": "project"}]
        self._ask("initialize", processId=None, rootUri=root, capabilities=hover, workspaceFolders=folders)
        self._send(method="initialized", params={})
        document = {"uri": self._uri, "languageId": "python", "version": 1, "text": self._text}
        self._send(method="textDocument/didOpen", params={"textDocument": document})
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.communicate()

    def hover(self, words: str, after: str = "") -> str:
        """Return what is shown over the first place of ``words``."""
        before = self._text[: self._text.index(after + words) + len(after)]
        position = {"line": before.count("\n"), "character": len(before.rpartition("\n")[2])}
        shown = self._ask("textDocument/hover", textDocument={"uri": self._uri}, position=position)
        return str(shown["contents"]["value"])

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._send(id=self._number, method=method, params=params)
        for message in self._messages():
            if message.get("id") == self._number and "method" not in message:
                return message["result"]
            if message.get("method") == "workspace/configuration":
                items = [self._settings.get(item["section"]) for item in message["params"]["items"]]
                self._send(id=message["id"], result=items)
            elif "method" in message and "id" in message:
                self._send(id=message["id"], result=None)
        raise AssertionError("the language server ended")

    def _send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        stream = self._pipe(self._server.stdin)
        stream.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        stream.flush()

    def _messages(self) -> Iterator[dict[str, Any]]:
        stream = self._pipe(self._server.stdout)
        while line := stream.readline():
            length = int(line.partition(b":")[2])
            while stream.readline() not in (b"\r\n", b""):
                pass
            yield json.loads(stream.read(length))

    @staticmethod
    def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
        assert stream is not None
        return stream
