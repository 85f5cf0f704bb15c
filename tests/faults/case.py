"""What a case is, and how it is played: by ortgpu, by plain ONNX Runtime, and again after its advice was taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import pytest

from tests.lab import GPU, NVML, Cuda, Machine, Outcome, Overlay
from tests.lab.child import outcome_of
from tests.lab.environments import network_variables
from tests.lab.fixtures import Lab
from tests.lab.installed import LINKS_CUDNN, older_than

Break = Callable[[Lab, Overlay], object]

OWN = "own"  # the row of a fault that the corpus does not have

#: The error that is left on a machine without a GPU when everything else has been mended.
MENDED = "DriverNotFoundError"
#: After a fix on a machine with GPUs, where a session opens.
OPENS = "none"


#: The operator that needs cuDNN is named where it is opened for it; a provider that links cuDNN always needs it.
NEEDED_BY_CONV = () if LINKS_CUDNN else ("Conv",)


def nothing(_lab: Lab, _overlay: Overlay) -> None:
    """Of an environment in which everything is whole."""


class Code(str):
    """An argument that is written into the child as it is, not as a string."""

    def __repr__(self) -> str:
        return str(self)


class AnyCase(Protocol):
    """What the table says of a case, on Linux or on Windows."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def rows(self) -> tuple[str, ...]: ...
    @property
    def error(self) -> str: ...
    @property
    def advice_of(self) -> str: ...


@dataclass(frozen=True)
class Case:
    """One broken environment.

    Attributes:
        error: name of the class that is raised, exactly.
        says: what ``str(error)`` must hold.
        breaks: what is done to an environment in which everything is installed.
        group, rows: the letter of its group, and the rows of the corpus that it stands for.
        prelude: what the program does before it opens a session.
        starts: the machine that is broken, where that is not one with ``cuda`` and ``nvml`` and everything installed.
        ask: a session, a diagnosis that tries everything in a child process, where a session would end the process, or
            a plain session under the guard.
        others: classes that ``others`` must hold.
        silent_about: what the text must not hold: the wrong culprit.
        details: fields of the error, exactly. A tuple is given as a list.
        cpu: whether ``allow_cpu`` opens a session: not where there is no ONNX Runtime that could, nor for a request
            that is wrong in itself. None: a request that allows and forbids the CPU makes no sense.
        plain: what plain ONNX Runtime does, as :func:`outcome_words` has it.
        plain_arguments: how it is asked, where that is not ``providers=["CUDAExecutionProvider"]`` after
            ``preload_dlls()``.
        advice_of: the class whose fixes are executed, where that is not the error but one of the others.
        after: the error that is left when a fix has been executed; None where no fix can be executed here.
        needs: what the fixes need that cannot be executed, in their order.
        slow_break, slow_fix: it takes a download of hundreds of megabytes to break the environment, or to mend it.
        since: the first release of ONNX Runtime of which it is true; with an older one the case is skipped.
        plain_since: the first release that does what ``plain`` says, where an older one does something else.
    """

    name: str
    error: str
    says: tuple[str, ...]
    breaks: Break = nothing
    group: str = ""
    rows: tuple[str, ...] = (OWN,)
    cuda: Cuda | None = None
    nvml: NVML | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    prelude: str = ""
    starts: Callable[[Lab], Machine] | None = None
    ask: Literal["session", "probe", "guarded"] = "session"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: str = "relu"
    others: tuple[str, ...] = ()
    silent_about: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    cpu: bool | None = True
    plain: str = "logged"
    plain_arguments: Mapping[str, Any] | None = None
    advice_of: str = ""
    after: str | None = None
    needs: tuple[str, ...] = ()
    slow_break: bool = False
    slow_fix: bool = True
    since: tuple[int, ...] = ()
    plain_since: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    def machine(self, lab: Lab) -> Machine:
        if reason := older_than(self.since):
            pytest.skip(reason)
        machine = self.starts(lab) if self.starts is not None else lab.machine(cuda=self.cuda, nvml=self.nvml)
        self.breaks(lab, machine.overlay)
        env = {name: value.replace("{overlay}", str(machine.overlay.root)) for name, value in self.env.items()}
        return machine.but(env={**machine.env, **env})

    def open(self, lab: Lab, machine: Machine, *, again: Mapping[str, Any] | None = None, **arguments: Any) -> Outcome:
        """What ``ortgpu`` does; with ``again``, further arguments, for a second session of the process too."""
        return outcome_of(machine.run(self._code(lab, again, **arguments)))

    def open_plain(self, lab: Lab, machine: Machine) -> Outcome:
        """What plain ONNX Runtime does."""
        arguments = dict(self._plain_arguments())
        code = f"open_plain_session({str(getattr(lab.models, self.model))!r}, {arguments!r})"
        return outcome_of(machine.run(f"{self.prelude}\n{code}"))

    def open_after(self, lab: Lab, machine: Machine, fix: Mapping[str, Any]) -> Outcome:
        """What ``ortgpu`` does after a fix, with the text that was printed, was applied."""
        network = network_variables(lab.wheels.folder / "pip")
        code = self._code(lab)
        if fix["kind"] == "python":
            code = f"{fix['text']}\n{code}"
        first = fix["text"] if fix["kind"] == "shell" else None
        return outcome_of(machine.run(code, first=first, env=network, timeout=1200))

    def _code(self, lab: Lab, again: Mapping[str, Any] | None = None, **arguments: Any) -> str:
        if self.ask == "probe":
            return f"{self.prelude}\ndiagnose_here(True)"
        model = str(getattr(lab.models, self.model))
        if self.ask == "guarded":
            plain = {"providers": ["CUDAExecutionProvider"], "preload": False, **self.arguments}
            return f"{self.prelude}\nimport ortgpu; ortgpu.install()\nopen_plain_session({model!r}, {plain!r})"
        return f"{self.prelude}\nopen_session({model!r}, {dict(self.arguments, **arguments)!r}, {again!r})"

    def _plain_arguments(self) -> Mapping[str, Any]:
        if self.plain_arguments is not None:
            return self.plain_arguments
        arguments = {name: value for name, value in self.arguments.items() if name not in ("device", "cpu_nodes")}
        device = self.arguments.get("device")
        if device is not None:
            ordinal = str(device).removeprefix("cuda:")
            arguments["providers"] = [("CUDAExecutionProvider", {"device_id": ordinal})]
        return {"providers": ["CUDAExecutionProvider"], **arguments}


def outcome_words(outcome: Outcome) -> str:
    """What a plain session did: the ways by which it said so, loudest first, or "silent" when it said nothing."""
    words = [word for word in ("aborted", "raised", "warned", "printed", "logged") if word in outcome.signs]
    return " ".join(words) or "silent"


def in_group(group: str, cases: Iterable[Case]) -> list[Case]:
    """The same cases with their group."""
    return [replace(case, group=group) for case in cases]


def removing(*patterns: str) -> Break:
    return lambda _lab, overlay: overlay.remove(*patterns)


def truncating(pattern: str, size: int) -> Break:
    return lambda _lab, overlay: overlay.truncate(pattern, size)


def library(stem: str) -> str:
    """The file of a library, in whatever wheel it lies."""
    return f"nvidia/*/lib/{stem}.so.*"


def own_path(overlay: Overlay, pattern: str) -> str:
    """The one path that a pattern matches, relative to site-packages, as the methods of an overlay take it."""
    return overlay.path(pattern).relative_to(overlay.site).as_posix()


def edit(overlay: Overlay, path: str, pattern: bytes, replacement: str) -> None:
    """Substitute every match in a file, of which there has to be one."""
    text, count = re.subn(pattern, replacement.encode(), (overlay.site / path).read_bytes())
    assert count, f"{pattern!r} is not in {path}"
    overlay.replace(path, text)


def unreadable(overlay: Overlay, pattern: str) -> None:
    """Forbid everybody to read a file: a copy of it, since other links to the original keep their mode."""
    path = own_path(overlay, pattern)
    overlay.replace(path, (overlay.site / path).read_bytes())
    (overlay.site / path).chmod(0)


AARCH64 = 183  # EM_AARCH64, elf.h

#: Gives up root's power to read whatever it likes, for this process and those that it starts: capability.h, prctl(2).
AS_A_USER = """
import ctypes
libc, kept, header = ctypes.CDLL(None), (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 2)(0x20080522, 0)
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP, which only root may and only root needs
libc.capget(header, kept)
kept[:3] = [each & ~0b110 for each in kept[:3]]
libc.capset(header, kept)
"""

H200 = GPU(uuid="GPU-11111111-2222-3333-4444-555555555555", name="NVIDIA H200", capability=(9, 0))


def with_gpus(*gpus: GPU) -> dict[str, Any]:
    return {"cuda": Cuda(devices=gpus), "nvml": NVML(gpus=gpus)}
