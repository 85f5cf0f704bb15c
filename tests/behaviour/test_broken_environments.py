"""Every broken environment ends in an exception that names the cause, and never in a session on the CPU.

From the user's side: real wheels taken apart in the lab, the real loader and provider, ``GPUSession(model)``, and what
comes of it. The environments are the table of ``tests/faults``.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib import metadata

import pytest

from tests.faults import CASES, Case
from tests.faults.advice import advisor, executable_fixes
from tests.faults.case import H200, MENDED, library, with_gpus
from tests.lab import GPU, NVML, Cuda, Outcome, Problem
from tests.lab.child import outcome_of
from tests.lab.fixtures import Lab
from tests.lab.installed import soname

#: Where a session that may run on the CPU opens there, and where it is the request that is wrong.
ON_CPU = [case for case in CASES if case.cpu and case.ask == "session" and case.group != "G"]
NOT_ON_CPU = [case for case in CASES if case.cpu is False and case.ask == "session"]

BUILTIN = {
    "PackageError": "ImportError",
    "LibraryError": "OSError",
    "DeviceNotFoundError": "LookupError",
    "ProviderRequestError": "ValueError",
    "ProviderOptionError": "ValueError",
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.slow_break) for case in CASES]
)
def test_a_broken_environment_raises_its_cause(lab: Lab, case: Case) -> None:
    """And then, in the same process, it is the reason for a session on the CPU, if that is allowed."""
    again = {"allow_cpu": True} if case in ON_CPU or case in NOT_ON_CPU else None
    outcome = case.open(lab, case.machine(lab), again=again)
    assert outcome.result.returncode == 0, outcome.result.output
    error = outcome.error
    assert error is not None, f"a session on {outcome.providers}"
    assert error.type == case.error, error.text
    for word in case.says:
        assert word in error.text
    for word in case.silent_about:
        assert word not in error.text
    assert set(case.others) <= set(error.other_types), error.text
    assert {name: error.details[name] for name in case.details} == dict(case.details)
    # What every error keeps, whatever its cause
    assert "GPUError" in error.bases
    assert "RuntimeError" in error.bases
    assert all(builtin in error.bases for base, builtin in BUILTIN.items() if base in error.bases)
    assert error.text.startswith(str(error.summary))
    assert f"ortgpu explain {error.code}" in error.text
    assert error.evidence, error.text
    assert error.fixes, error.text
    assert outcome.result.stdout == "", "a library does not print"
    assert not outcome.warnings, outcome.warnings
    # Whether its advice can be executed; that it is true when it is, test_advice.py shows
    assert bool(executable_fixes(case, error)) == (case.after is not None), error.text
    others = [fix["needs"] or "" for fix in error.remedies if not fix["executable"]]
    assert sorted(others) == sorted(case.needs), error.text  # in a container the host comes before the driver
    for fix in advisor(case, error).remedies:  # the interpreter of the environment that is broken, and no other
        assert fix["text"].count(f"{lab.folder}/environment0/bin/python -m pip") == fix["text"].count(" -m pip")
    if again is not None:
        assert outcome.again is not None
        assert_of_a_session_that_may_run_on_the_cpu(outcome.again, case)


def assert_of_a_session_that_may_run_on_the_cpu(outcome: Outcome, case: Case) -> None:
    if case.cpu:
        assert_on_cpu_because_of(outcome, case.error)
        return
    assert outcome.error is not None, f"a session on {outcome.providers}"
    assert outcome.error.type == case.error, outcome.error.text


def one_of_each_error(cases: list[Case]) -> list[Case]:
    return list({case.error: case for case in reversed(cases) if not case.slow_break}.values())


@pytest.mark.parametrize("case", [*one_of_each_error(ON_CPU), *one_of_each_error(NOT_ON_CPU)], ids=str)
def test_the_cpu_is_taken_only_when_it_is_allowed_and_never_silently(lab: Lab, case: Case) -> None:
    """By the first session of a process: not for what the CPU would not mend."""
    assert_of_a_session_that_may_run_on_the_cpu(case.open(lab, case.machine(lab), allow_cpu=True), case)


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_variable_allows_the_cpu_too(lab: Lab, value: str, allowed: bool) -> None:
    outcome = lab.machine(env={"ORTGPU_ALLOW_CPU": value}).open_session(lab.models.relu)
    if allowed:
        assert_on_cpu_because_of(outcome, "DriverNotFoundError")
    else:
        assert outcome.error is not None
        assert outcome.error.type == "DriverNotFoundError"


def assert_on_cpu_because_of(outcome: Outcome, error: str) -> None:
    assert outcome.error is None, outcome.error.text
    assert outcome.result.returncode == 0, outcome.result.output
    assert outcome.providers == ("CPUExecutionProvider",)
    assert outcome.device == "cpu"
    warning = next(warning for warning in outcome.warnings if warning.type == "CPUExecutionWarning")
    assert warning.error is not None
    assert warning.error.type == error
    assert warning.error.text in warning.text


# Environments in which the fault is not one of those above: the CPU is still not taken.


def test_a_driver_that_fails_only_inside_the_cuda_runtime(lab: Lab) -> None:
    """The last resort: every check passes, since the stub describes a device, and the runtime refuses to open it."""
    outcome = lab.machine(**with_gpus(H200)).open_session(lab.models.relu)
    assert outcome.error is not None, f"a session on {outcome.providers}"
    assert "GPUError" in outcome.error.bases
    assert "500" in outcome.error.text
    assert outcome.result.stdout == ""


def test_a_compute_mode_that_lets_nobody_in(lab: Lab) -> None:
    """The driver counts such a GPU; what opening it would return, 46, is beyond the stub. NVML knows the mode."""
    gpu = GPU(uuid=H200.uuid, name=H200.name, compute_mode=2)
    outcome = lab.machine(**with_gpus(gpu)).open_session(lab.models.relu)
    assert outcome.error is not None, f"a session on {outcome.providers}"
    busy = next(error for error in (outcome.error, *outcome.error.others) if error.type == "DeviceBusyError")
    for word in ("NVIDIA H200", "prohibited", H200.uuid, "nvidia-smi"):
        assert word in busy.text


def test_a_generation_that_the_wheel_does_not_name_and_serves(lab: Lab) -> None:
    """Machine code for 8.6 runs on 8.7. (That for 12.0a, in the wheel, does not run on 12.1.)"""
    orin = GPU(uuid=H200.uuid, name="Orin", capability=(8, 7))
    outcome = lab.machine(**with_gpus(orin)).open_session(lab.models.relu)
    assert outcome.error is not None
    assert outcome.error.type != "UnsupportedDeviceError", outcome.error.text


@pytest.mark.parametrize(
    "code",
    [
        "import ortgpu; ortgpu.preload(); import onnxruntime",
        "import onnxruntime, ortgpu; ortgpu.preload()",
        "import ortgpu; ortgpu.diagnose(); ortgpu.preload(); ortgpu.GPUSession",
    ],
    ids=["before-the-import", "after-the-import", "diagnosed-first"],
)
def test_libraries_can_be_loaded_before_and_after_the_import(lab: Lab, code: str) -> None:
    """The provider's static initialisers use what ``import onnxruntime`` sets up, and crash without it."""
    lab.machine(**with_gpus(H200)).run(code).ok()


def test_parts_of_cudnn_are_asked_whether_they_belong_together(lab: Lab) -> None:
    code = "import ortgpu; report(ortgpu.preload().cudnn_mixed)"
    machine = lab.machine()
    assert machine.run(code).ok().json == []
    checks = {f"cudnn{part}VersionCheck": 0 for part in ("Graph", "Cnn", "Adv")}
    made = lab.stubs.library("libcudnn.so.9", {"cudnnGetCudartVersion": 13000, "cudnnOpsVersionCheck": 1002, **checks})
    machine.overlay.replace("nvidia/cudnn/lib/libcudnn.so.9", made)
    mixed = machine.run(code).ok().json
    assert {os.path.dirname(path) for path in mixed} == {str(machine.overlay.site / "nvidia/cudnn/lib")}
    assert {"libcudnn.so.9", "libcudnn_ops.so.9"} <= {os.path.basename(path) for path in mixed}
    machine.overlay.remove("nvidia/cudnn/lib/libcudnn_ops.so.9", "nvidia/cudnn/lib/libcudnn_[ac]*")
    assert machine.run(code).ok().json == [], "what is not there cannot be asked"


def test_a_working_nvml_is_not_needed(lab: Lab) -> None:
    """What NVML does not know is unknown, not wrong."""
    for nvml in (None, NVML(init=9), NVML(error=999)):
        outcome = lab.machine(cuda=Cuda(init=999), nvml=nvml).open_session(lab.models.relu)
        assert outcome.error is not None
        assert outcome.error.type == "DriverUnusableError", outcome.error.text


def test_what_is_not_about_the_gpu_stays_onnx_runtimes_own(lab: Lab) -> None:
    machine = lab.machine()
    missing_file = machine.open_session(lab.folder / "no-such-model.onnx", allow_cpu=True)
    assert missing_file.error is not None
    assert missing_file.error.type == "NoSuchFile"
    (lab.folder / "text.onnx").write_text("not a model", encoding="utf-8")
    invalid = machine.open_session(lab.folder / "text.onnx", allow_cpu=True)
    assert invalid.error is not None
    assert invalid.error.type in {"InvalidProtobuf", "Fail", "InvalidGraph"}


def test_a_limit_on_the_address_space_is_not_blamed_on_the_packages(lab: Lab) -> None:
    """The files are whole: installed again they are as large as before. Without the limit they are loaded."""
    limited = Case(
        "little-address-space",
        "LibraryNotFoundError",
        (soname("libcublasLt"),),
        prelude="import resource; resource.setrlimit(resource.RLIMIT_AS, (700 << 20, resource.RLIM_INFINITY))",
    )
    error = limited.open(lab, limited.machine(lab)).error
    assert error is not None
    assert error.type == limited.error, error.text
    assert soname("libcublasLt") in error.details["missing"]
    assert "ulimit -v" in error.text
    assert "it is 700 MiB" in error.text
    assert "pip install" not in error.text
    assert [fix["needs"] for fix in error.remedies] == ["host"]
    raised = replace(limited, prelude=f"{limited.prelude}\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    mended = raised.open(lab, raised.machine(lab)).error
    assert mended is not None
    assert mended.type == MENDED, mended.text


def test_a_limit_on_the_private_memory_is_not_blamed_on_the_file_system(lab: Lab) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (100 << 20, 100 << 20))"
    error = outcome_of(lab.machine(**with_gpus(H200)).run(f"{limit}\ndiagnose_here(True)")).error
    assert error is not None
    assert "ulimit -d" in error.fixes[0]
    assert "it is 100 MiB" in error.fixes[0]
    assert "noexec" not in error.text


def test_too_few_descriptors_are_not_blamed_on_the_gpu(lab: Lab) -> None:
    """Of a server that leaks them, say. The driver of an H100 then gave 304, 999, 100 or 46, by how many were left."""
    leaking = (
        "import os, resource\n"
        "taken = [os.dup(0) for _ in range(200)]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 10, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    )
    case = Case("", "", (), cuda=Cuda(devices=(H200,), files=30), nvml=NVML(gpus=(H200,)), prelude=leaking)
    outcome = case.open(lab, case.machine(lab))
    error = outcome.error
    assert error is not None
    assert error.type == "DriverUnusableError", error.text
    assert re.search(r"may open 2\d\d files and has 2\d\d open", error.text), error.text
    assert error.details["cuda_code"] == 304
    assert "docker run --gpus" not in error.text
    assert [fix["kind"] for fix in error.remedies] == ["python", "manual"]
    raised = replace(case, prelude=f"{leaking}\n{error.fixes[0]}")
    mended = raised.open(lab, raised.machine(lab)).error
    assert mended is not None
    assert mended.details["cuda_code"] == 500, mended.text  # the CUDA runtime, which sees that it talks to a stub


def played(lab: Lab, prelude: str) -> Problem:
    case = Case("", "", (), prelude=prelude)
    error = case.open(lab, case.machine(lab)).error
    assert error is not None
    return error


def test_a_module_called_numpy_is_not_blamed_on_the_installed_one(lab: Lab) -> None:
    broken = "import os, sys; sys.path.insert(0, os.getcwd()); open('numpy.py', 'w').write('raise ImportError(1)')"
    error = played(lab, broken)
    assert error.type == "BrokenPackageError", error.text
    assert "numpy.py is imported instead of the installed numpy" in error.text
    assert "pip" not in error.text
    assert played(lab, f"{broken}; os.rename('numpy.py', 'mine.py')").type == MENDED


@pytest.mark.parametrize(
    "stand_in", ["types.ModuleType('onnxruntime')", "None", "mock.MagicMock()", "mock.create_autospec(onnxruntime)"]
)
def test_a_stand_in_for_onnxruntime_is_not_blamed_on_the_package(lab: Lab, stand_in: str) -> None:
    imports = "import sys, types; from unittest import mock" + ("; import onnxruntime" if "(onnx" in stand_in else "")
    broken = f"{imports}; sys.modules['onnxruntime'] = {stand_in}"
    error = played(lab, broken)
    assert error.type == "BrokenPackageError", error.text
    assert "sys.modules" in error.text
    assert "pip" not in error.text
    assert played(lab, f"{broken}; del sys.modules['onnxruntime']").type == MENDED


@pytest.mark.skipif(
    tuple(map(int, metadata.version("numpy").split(".")[:2])) < (2, 4), reason="NumPy can be imported again before 2.4"
)
@pytest.mark.parametrize(
    "removed",
    [
        "with mock.patch.dict(sys.modules): import numpy",
        "import numpy; [sys.modules.pop(name) for name in list(sys.modules) if name.split('.')[0] == 'numpy']",
        "import onnxruntime; [sys.modules.pop(name) for name in list(sys.modules) if name[:5] in ('numpy', 'onnxr')]",
    ],
)
def test_a_numpy_that_is_imported_again_is_not_blamed_on_the_package(lab: Lab, removed: str) -> None:
    """It refuses that itself, or where ONNX Runtime's extension imports it."""
    mocks = "import sys; from unittest import mock\n"
    error = played(lab, f"{mocks}{removed}")
    assert error.type == "BrokenPackageError", error.text
    assert "numpy was removed from sys.modules" in error.text
    assert "pip" not in error.text
    mended = "import numpy\nwith mock.patch.dict(sys.modules): import numpy"
    assert played(lab, f"{mocks}{mended}").type == MENDED


def test_no_further_thread_is_no_obstacle(lab: Lab) -> None:
    refuse = 'import threading\ndef refuse(self): raise RuntimeError("can\'t start new thread")\n'
    assert played(lab, f"{refuse}threading.Thread.start = refuse").type == MENDED


def test_an_integer_of_numpy_is_an_ordinal(lab: Lab) -> None:
    machine = lab.machine(**with_gpus(H200))
    code = (
        "import numpy\nfrom ortgpu import DeviceNotFoundError, GPUSession\n"
        f"try: GPUSession({str(lab.models.relu)!r}, device=numpy.int64(5))\n"
        "except DeviceNotFoundError as error: print(type(error.requested).__name__, error.requested)\n"
    )
    result = machine.run(code)
    assert result.stdout.split() == ["int", "5"], result.output


def test_a_library_that_a_program_only_reads_is_not_taken_for_loaded(lab: Lab) -> None:
    """As a scanner or a hash does, and as glibc leaves one that it refused in the middle."""
    machine = lab.machine(**with_gpus(H200))
    path = str(machine.overlay.path(library("libcurand")))
    reading = f"import mmap, os; kept = mmap.mmap(os.open({path!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ)"
    error = outcome_of(machine.run(f"{reading}\nopen_session({str(lab.models.relu)!r}, {{}})")).error
    assert error is not None
    assert error.type == "DriverUnusableError", error.text


ATTEMPTS = "behaviour.attempts.attempts"


def test_what_keeps_a_process_from_the_gpu_is_found_out_once_where_the_cpu_may_serve(lab: Lab) -> None:
    done = lab.machine(cuda=Cuda(devices=(GPU(),), init=803)).run_program(ATTEMPTS).ok()
    parts = re.findall(r"^--- (.+)\n((?:(?!--- ).*\n)*)", done.stderr, re.MULTILINE)
    often = {name: text.count("call cuInit") for name, text in parts}
    assert {name: count > 0 for name, count in often.items()} == {
        "first": True,
        "another device": True,
        "another variable": True,
        "not allowed": True,
        "none": False,
        "forked": True,
        "end": False,
    }
    assert often["not allowed"] > 2 * often["first"], "each of the three tries"
    on_cpu = [["cpu", ["DriverUnusableError"]]] * 3
    assert done.json == [*on_cpu * 3, *[["DriverUnusableError", []]] * 3, *on_cpu]
