"""Functions that tests call in child processes with a channel."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

from ortgpu.process import parent
from ortgpu.provider import runtime


def facts() -> dict[str, object]:
    return {"path": sys.path, "stdin": sys.stdin.read(), "group": os.getpgid(0), "pid": os.getpid()}


def log(name: str, *words: str) -> None:
    for word in words:
        logging.getLogger(name).warning("%s", word)


def tell_and_return(count: int) -> str:
    for number in range(count):
        parent.tell(number)
    return "returned"


def start_grandchild(seconds: float) -> int:
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]).pid


def descriptors_of_program() -> list[str]:
    """Return the files of a program that is started without closing anything."""
    command = "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')[:-1]))"
    return subprocess.run(
        [sys.executable, "-c", command], close_fds=False, capture_output=True, text=True, check=True
    ).stdout.split()


class UnpicklableError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def raise_unpicklable() -> None:
    raise UnpicklableError(1, 2)


def write_and_abort(text: str) -> None:
    os.write(1, text.encode())
    os.abort()


def sleep_without_reading(seconds: float) -> None:
    time.sleep(seconds)


_prepared: list[str] = []


def prepare_in_child(word: str) -> None:
    _prepared[:] = [word]


def prepared_in_child() -> str:
    return _prepared[0]


def raise_key_error() -> None:
    raise KeyError("x")


_noted: list[str] = []


def note_loads_of_the_runtime() -> None:
    load = runtime._load

    def noting() -> runtime.Runtime:
        _noted.append("after onnxruntime" if "onnxruntime" in sys.modules else "before onnxruntime")
        return load()

    runtime._load = noting


def noted() -> list[str]:
    return _noted
