"""What a case on Windows is, and how it is played: by ortgpu, by plain ONNX Runtime, and again after its advice.

It is played in Python for Windows, in Wine, by the machines of ``tests/lab/windows.py``. Its own libraries of CUDA are
made by MinGW, and export what the provider takes: with them and without a driver, what is left at the end is
``DriverNotFoundError``.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ortgpu.environment.libraries.catalogue import LIBRARIES
from ortgpu.environment.libraries.library_file import imported_names
from tests.faults.advice import advisor, executable_fixes
from tests.faults.case import MENDED, OWN, outcome_words
from tests.faults.report import Played
from tests.lab.child import PROBE, Outcome, outcome_of
from tests.lab.environments import call
from tests.lab.models import Models
from tests.lab.stubs import GPU, NVML, Cuda
from tests.lab.windows import SITE_PACKAGES, WHEELS, Windows
from tests.support.children import Child

Break = Callable[[Windows], object]

OF_LINUX = re.compile(
    r"\b(ldconfig|containers?|libcuda|sudo|docker|apt-get|LD_\w+|rm -rf|export|unset|kernel modules?|reboot|ulimit)\b"
    r"|\bdmesg\b|/(proc|etc|usr|dev)\b|\.so\b"
)

RTX_4090 = GPU("GPU-11111111-2222-3333-4444-555555555555", "NVIDIA GeForce RTX 4090", (8, 9), 24 << 30, 23 << 30)
A100 = replace(RTX_4090, name="NVIDIA A100", capability=(8, 0))


@dataclass(frozen=True)
class WindowsCase:
    """One broken Windows. What is not said here is as in :class:`tests.faults.Case`.

    Attributes:
        cuda: whether the wheels of CUDA are installed before it is broken.
        pip: whether that Python has pip.
        driver: what the driver and NVML answer; None: there is no driver.
        options: those of Python, such as ``-s``.
        python: the program, if it is not ``C:\\Python\\python.exe``.
        index: releases that the case or its advice installs, beside onnxruntime-gpu as it is installed.
        shown: it is among the few that show most.
    """

    name: str
    error: str
    says: tuple[str, ...]
    breaks: Break = lambda _machine: None
    group: str = ""
    rows: tuple[str, ...] = (OWN,)
    cuda: bool = True
    pip: bool = True
    driver: tuple[Cuda, NVML] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    python: str = "C:\\Python\\python.exe"
    prelude: str = ""
    ask: Literal["session", "probe", "guarded"] = "session"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: str = "relu"
    others: tuple[str, ...] = ()
    silent_about: tuple[str, ...] = ()
    cpu: bool | None = True
    plain: str = "printed"
    plain_arguments: Mapping[str, Any] | None = None
    advice_of: str = ""
    after: str | None = None
    needs: tuple[str, ...] = ()
    index: tuple[str, ...] = ()
    shown: bool = False

    def __str__(self) -> str:
        return self.name


class Wheels:
    """A folder of wheels, from which pip installs in a machine without any index: drive W: there.

    Those of ONNX Runtime and NumPy are the published ones; those of NVIDIA hold the libraries that MinGW made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cuda: dict[str, Path] = {}
        self._changing = threading.Lock()
        self._is_published_there = False
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            machine = Windows(Path(scratch))
            machine.install_cuda()
            for requirement, (place, names) in WHEELS.items():
                stem = requirement.replace("-", "_").replace("==", "-")
                files = [f"{place}/{file}" for file in names]
                self.cuda[requirement] = self._pack(machine, stem, "py3-none-win_amd64", files)

    def _pack(self, machine: Windows, stem: str, tag: str, files: Sequence[str]) -> Path:
        info = f"{stem}.dist-info"
        described = f"Wheel-Version: 1.0\nGenerator: the laboratory\nRoot-Is-Purelib: false\nTag: {tag}\n"
        extra = {
            f"{info}/METADATA": (machine.site / info / "METADATA").read_bytes(),
            f"{info}/WHEEL": described.encode(),
        }
        rows, target = io.StringIO(), self.folder / f"{stem}-{tag}.whl"
        record = csv.writer(rows, lineterminator="\n")
        with zipfile.ZipFile(target, "w") as archive:
            for name in files:
                extra.setdefault(name, (machine.site / name).read_bytes())
            for name, content in extra.items():
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                record.writerow([name, f"sha256={digest}", len(content)])
                archive.writestr(name, content)
            record.writerow([f"{info}/RECORD", "", ""])
            archive.writestr(f"{info}/RECORD", rows.getvalue())
        return target

    def add_published(self) -> None:
        """Add ONNX Runtime and NumPy as they are installed in a new machine."""
        with self._changing:
            if self._is_published_there:
                return
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                machine = Windows(Path(scratch))
                for name in ("onnxruntime_gpu-1.31.1", "numpy-1.26.4"):
                    self._pack(machine, name, "cp311-cp311-win_amd64", _recorded(machine.site / f"{name}.dist-info"))
            self._is_published_there = True

    def _add_cuda_12(self, onnxruntime: Path) -> None:
        """Add packages of the names of NVIDIA's for CUDA 12, with what the provider in this wheel takes of them."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            machine, provider = Windows(Path(scratch)), Path(scratch) / "provider.dll"
            with zipfile.ZipFile(onnxruntime) as archive:
                provider.write_bytes(archive.read("onnxruntime/capi/onnxruntime_providers_cuda.dll"))
            libraries: dict[str, dict[str, str]] = {}  # by requirement, the folders of DLLs
            for spec in LIBRARIES:
                if 12 in spec.dlls and not spec.stem.endswith("_infer"):
                    requirement = spec.wheels[12].replace("~=", "==").replace("-", "_")
                    component = requirement.partition("==")[0].removeprefix("nvidia_").removesuffix("_cu12")
                    folder = f"nvidia/{component}/bin"
                    libraries.setdefault(requirement, {})[spec.dlls[12]] = folder
            for requirement, folders in libraries.items():
                stem = requirement.replace("==", "-")
                name, version = requirement.split("==")
                said = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
                machine.write(f"{SITE_PACKAGES}\\{stem}.dist-info\\METADATA", said)
                for library, folder in folders.items():
                    taken = dict.fromkeys(imported_names(provider, library) or (), 0)
                    answers = {"cudnnGetCudartVersion": 12090} if library == "cudnn64_9.dll" else {}
                    machine.make(f"{SITE_PACKAGES}/{folder}/{library}".replace("/", "\\"),
                                 exports={"call": 0, **taken, **answers})  # fmt: skip
                files = [f"{folder}/{library}" for library, folder in folders.items()]
                self._pack(machine, stem, "py3-none-win_amd64", files)

    def download(self, requirement: str) -> None:
        """Add a wheel for Windows from the package index."""
        name, version = requirement.split("==")
        with self._changing:
            if not list(self.folder.glob(f"{name.replace('-', '_')}-{version}-*")):
                options = ("--only-binary=:all:", "--platform=win_amd64", "--python-version=3.11", "--no-deps", "-q")
                call([sys.executable, "-m", "pip", "download", *options, "--dest", str(self.folder), requirement])
                if name == "onnxruntime-gpu" and version < "1.27":
                    (wheel,) = self.folder.glob(f"{name.replace('-', '_')}-{version}-*")
                    self._add_cuda_12(wheel)

    def unpack(self, machine: Windows) -> None:
        for wheel in self.cuda.values():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(machine.site)


def _recorded(info: Path) -> list[str]:
    with (info / "RECORD").open(encoding="utf-8", newline="") as file:
        names = [row[0] for row in csv.reader(file) if row]
    inside = [name for name in names if not name.startswith("..") and not name.endswith("/RECORD")]
    return [name for name in inside if (info.parent / name).is_file() and not name.startswith(f"{info.name}/WHEEL")]


def machine_of(case: WindowsCase, folder: Path, wheels: Wheels, models: Models) -> Windows:
    """Make the broken machine."""
    machine = Windows(folder)
    (folder / "dosdevices/w:").symlink_to(wheels.folder)
    for model in (models.relu, models.conv):
        machine.write(f"C:\\{model.name}", model.read_bytes())
    if case.cuda:
        wheels.unpack(machine)
    if case.pip:
        machine.install_pip()
    if case.driver is not None:
        machine.install_driver(*case.driver)
    case.breaks(machine)
    machine.interpreter = case.python
    machine.variables.update(case.variables)
    return machine


def run(case: WindowsCase, machine: Windows, code: str) -> Outcome:
    report = machine.path("C:\\report")
    report.unlink(missing_ok=True)
    variables = {"CHILD_REPORT": "C:\\report"}
    text = f"{PROBE}\n{case.prelude}\n{code}"
    child = machine.python(*case.options, "-c", text, variables=variables, deadline=180)
    lines = report.read_text(encoding="utf-8").splitlines() if report.is_file() else []
    return outcome_of(replace(_readable(child), reports=dict(json.loads(line) for line in lines)))


def _readable(child: Child) -> Child:
    """ONNX Runtime writes its log as UTF-16 where Wine gives it no console."""
    return replace(child, stderr=child.stderr.replace("\0", "").replace("onnxruntime_", "onnxruntime:"))


def opened(case: WindowsCase, machine: Windows) -> Outcome:
    """Open a session, and one that may be on the CPU after it, which is reported as "cpu"."""
    code = _question_of(case)
    if case.cpu and case.ask == "session":
        model = f"C:\\{case.model}.onnx"
        arguments = dict(case.arguments, allow_cpu=True)
        code += (
            f"\nimport ortgpu\nfound = ortgpu.GPUSession({model!r}, **{arguments!r}).get_providers()\n"
            "with open(os.environ['CHILD_REPORT'], 'a') as file: print(json.dumps(['cpu', found]), file=file)"
        )
    return run(case, machine, code)


def opened_plainly(case: WindowsCase, machine: Windows) -> Outcome:
    given = case.plain_arguments
    if given is None:
        named = {name: value for name, value in case.arguments.items() if name not in ("device", "cpu_nodes")}
        if (device := case.arguments.get("device")) is not None:
            ordinal = str(device).removeprefix("cuda:")
            named["providers"] = [("CUDAExecutionProvider", {"device_id": ordinal})]
        given = {"providers": ["CUDAExecutionProvider"], **named}
    return run(case, machine, f"open_plain_session('C:\\\\{case.model}.onnx', {dict(given)!r})")


def follow(case: WindowsCase, machine: Windows, fix: Mapping[str, Any]) -> Outcome:
    """Execute a fix as it was printed, each line by cmd.exe, and open a session."""
    if fix["kind"] == "python":
        return run(replace(case, prelude=f"{fix['text']}\n{case.prelude}"), machine, _question_of(case))
    code = (
        "import subprocess, sys\n"
        f"for line in {[_for_wine(line) for line in fix['text'].splitlines()]!r}:\n"
        "    done = subprocess.run(line, shell=True)\n"
        "    if done.returncode: sys.exit(f'{line} ended with {done.returncode}')\n"
    )
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "W:\\", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1"}
    child = machine.python("-c", code, variables=pip, deadline=400)
    after = run(case, machine, _question_of(case))
    if child.returncode == 0:
        return after
    return replace(after, error=None, providers=None, result=child)


def _for_wine(line: str) -> str:
    r"""Wine takes the \" in C:\"My Python"\python.exe for an escaped quote, and Windows does not in a program's name:
    learn.microsoft.com/cpp, "Parsing C command-line arguments"."""
    program = re.match(r'(?:[^\s"]|"[^"]*")+', line)
    assert program is not None, line
    return f'"{program[0].replace(chr(34), "")}"{line[program.end() :]}'


def _question_of(case: WindowsCase) -> str:
    if case.ask == "probe":
        return "diagnose_here(True)"
    model = f"C:\\{case.model}.onnx"
    if case.ask == "guarded":
        plain = {"providers": ["CUDAExecutionProvider"], "preload": False, **case.arguments}
        return f"import ortgpu; ortgpu.install()\nopen_plain_session({model!r}, {plain!r})"
    return f"open_session({model!r}, {dict(case.arguments)!r})"


def play(
    case: WindowsCase, folder: Path, wheels: Wheels, models: Models, *, advice: bool = True, plainly: bool = True
) -> Played:
    """Play a case as :func:`tests.faults.report.play` does."""
    found: list[str] = []
    machines = _machines(case, folder, wheels, models)
    machine = next(machines)
    try:
        outcome = opened(case, machine)
        error = outcome.error
        if error is None:
            return Played(case, "none", [f"a session on {outcome.providers}\n{outcome.result.output}"], "not tried")
        found += [f"{error.type} instead of {case.error}"] if error.type != case.error else []
        found += [f"{word!r} is not named" for word in case.says if word not in error.text]
        found += [f"{word!r} is blamed" for word in case.silent_about if word in error.text]
        found += [f"{name} is not found" for name in case.others if name not in error.other_types]
        words = "\n".join([error.text, *(other.text for other in error.others)])
        found += [f"a word of Linux: {match[0]}" for match in OF_LINUX.finditer(words)]
        found += [error.text, f"others: {error.other_types}"] if found else []
        if case.cpu and case.ask == "session" and outcome.result.reports.get("cpu") != ["CPUExecutionProvider"]:
            found.append(f"with allow_cpu: {outcome.result.output[-2000:]}")
        plain = outcome_words(opened_plainly(case, machine)) if plainly else case.plain
        if plain != case.plain:
            found.append(f"plain ONNX Runtime: {plain} instead of {case.plain}")
        played = Played(case, error.type, found, plain)
        if found:
            return played
        adviser = advisor(case, error)
        fixes = executable_fixes(case, error)
        played.needs = [fix["needs"] or "a person" for fix in adviser.remedies if not fix["executable"]]
        played.fixes = len(fixes)
        if (not fixes) != (case.after is None):
            found.append(f"fixes: {[fix['text'] for fix in adviser.remedies]}")
        if advice and fixes and not found:
            wheels.add_published()
            problems = [problem for fix in fixes if (problem := _not_mended(case, next(machines), fix))]
            found += problems
            played.advice = not problems
        return played
    finally:
        machines.close()


def _machines(case: WindowsCase, folder: Path, wheels: Wheels, models: Models) -> Generator[Windows, None, None]:
    """Make the broken machine anew for each attempt; one is there at a time."""
    for requirement in case.index:
        wheels.download(requirement)
    while True:
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:
            machine = machine_of(case, Path(own), wheels, models)
            try:
                yield machine
            finally:
                machine.end()


def _not_mended(case: WindowsCase, machine: Windows, fix: Mapping[str, Any]) -> str | None:
    outcome = follow(case, machine, fix)
    error, fault = outcome.error, case.advice_of or case.error
    if error is None:
        return f"after {fix['text']}:\n{outcome.result.output[-4000:]}"
    if error.type != case.after or (fault in (error.type, *error.other_types) and fault != case.after):
        return f"after {fix['text']}: {error.type} with {error.other_types}\n{error.text}"
    return None


__all__ = ["A100", "MENDED", "RTX_4090", "SITE_PACKAGES", "Wheels", "WindowsCase", "play"]
