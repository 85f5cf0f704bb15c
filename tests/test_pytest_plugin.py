"""The pytest plugin: inner test runs, on machines that are made up, and on machines of the lab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import ortgpu
import ortgpu.environment.driver  # what only inner runs import, pytester takes out of sys.modules after each
import ortgpu.pytest_plugin
from ortgpu import testing
from ortgpu.devices import CPU, Device
from ortgpu.errors import DriverUnusableError, ExecutionError, GPUError, NoDeviceError, manual
from ortgpu.testing import (
    FoundGPUs,
    GPURequirement,
    UnmeasurableMemoryError,
    UnmetRequirementError,
    choose_gpus,
    gpu_leak_check,
    gpu_sessions,
)
from tests.lab import GPU, NVML, Cuda, Machine
from tests.lab.fixtures import Lab

pytest_plugins = "pytester"

GiB = 2**30
PLUGIN = "ortgpu.pytest_plugin"
DEADLINE = 100.0

NO_GPU = DriverUnusableError(
    "cuInit returned 999", evidence=["NVML sees 1 GPU(s)"], fixes=[manual("reboot", needs="reboot")], cuda_code=999
)

ONE_OF_EACH = """
    import pytest

    def test_plain():
        pass

    @pytest.mark.gpu
    def test_marked():
        pass

    def test_fixture(gpu_device):
        pass
"""


def gpu(ordinal: int, **changes: Any) -> Device:
    facts = {
        "kind": "cuda",
        "ordinal": ordinal,
        "uuid": f"GPU-{ordinal}",
        "name": "NVIDIA H200",
        "compute_capability": (9, 0),
        "total_memory": 141 * GiB,
        "driver_version": "580.65.06",
    }
    return Device(**{**facts, **changes})


class Faked:
    """The machine that inner runs in this process see, and how often they looked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = FoundGPUs((), NO_GPU)
        self.looks = 0
        self.memory: dict[str, tuple[int, int] | None] = {}
        monkeypatch.setattr(testing, "find_gpus", self.find)
        monkeypatch.setattr("ortgpu.environment.driver.read_gpu_memory", lambda uuid: self.memory.get(uuid))

    def find(self) -> FoundGPUs:
        self.looks += 1
        return self.found

    def has(self, *gpus: Device, problem: GPUError | None = None) -> None:
        self.found = FoundGPUs(gpus, problem)


class Session:
    """In the place of GPUSession: says what it was asked for, and that it was closed."""

    log: list[str]  # of the test that uses it
    device = gpu(0)

    def __init__(self, model: str, *arguments: Any, **options: Any) -> None:
        self.model, self.arguments, self.options = model, arguments, options
        self.log.append(f"open {model} on {options.get('device')}")

    def close(self) -> None:
        self.log.append(f"close {self.model}")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("ORTGPU_GPU", "ORTGPU_REQUIRE_GPU", "ORTGPU_ALLOW_CPU")
    of_pytest = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "CI", "BUILD_NUMBER")  # with the last two its summary says more
    for name in ours + of_pytest:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    return Faked(monkeypatch)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of sessions: they are not real."""
    log: list[str] = []
    monkeypatch.setattr(Session, "log", log, raising=False)
    monkeypatch.setitem(vars(ortgpu), "GPUSession", Session)  # setattr would first import the real one
    return log


Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """An inner run in this process, with no other plugin: pytest would compile each of them anew."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", "-ra", *arguments)

    return run


@pytest.fixture
def run_child(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """An inner run in a process of its own, which can import ortgpu and these tests."""
    root = str(Path(__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))

    def run(*arguments: str) -> pytest.RunResult:
        command = (sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-ra", *arguments)
        return pytester.run(*command, timeout=DEADLINE)

    return run


# Start-up


@pytest.mark.parametrize("named", [True, False], ids=["-p", "entry point"])
def test_start_up_imports_nothing_heavy(pytester: pytest.Pytester, named: bool) -> None:
    pytester.makeconftest(
        """
        import sys

        def pytest_sessionfinish(session):
            heavy = {"onnxruntime", "numpy", "onnx", "pynvml", "rich", "click", "torch"} & set(sys.modules)
            ours = sorted(name for name in sys.modules if name.startswith("ortgpu"))
            print(f"heavy: {sorted(heavy)}, ours: {ours}")
        """
    )
    pytester.makepyfile("def test_plain(): pass")
    arguments = ["-p", PLUGIN] if named else []
    if not named and not is_installed():
        pytest.skip("ortgpu is importable here and not installed: there is no entry point")
    result = pytester.runpytest_subprocess("-s", "-p", "no:hypothesispytest", *arguments)
    result.assert_outcomes(passed=1)
    assert "heavy: [], ours: ['ortgpu', 'ortgpu.pytest_plugin']" in result.stdout.str()


def is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))


@pytest.mark.parametrize("way", ["-p twice", "-p and the entry point's name", "conftest", "variable"])
def test_loading_it_in_several_ways(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, faked: Faked, way: str
) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    arguments = ["-p", PLUGIN]
    if way == "-p twice":
        arguments += ["-p", PLUGIN]
    elif way == "-p and the entry point's name":
        arguments = ["-p", "ortgpu", "-p", PLUGIN] if is_installed() else ["-p", PLUGIN, "-p", "ortgpu"]
    elif way == "conftest":
        pytester.makeconftest(f"pytest_plugins = [{PLUGIN!r}]")
        arguments = [] if is_installed() else arguments
    else:
        monkeypatch.setenv("PYTEST_PLUGINS", PLUGIN)
        arguments = []
    pytester.runpytest_inprocess(*arguments, "--gpu=auto").assert_outcomes(passed=1, skipped=2)


def test_the_package_may_be_imported_before_pytest(pytester: pytest.Pytester, run_child: Run) -> None:
    """By ``ortgpu exec``, for instance. pytest marks the packages of installed plugins as this conftest does."""
    pytester.makeconftest("import ortgpu, pytest; pytest.register_assert_rewrite('ortgpu')")
    pytester.makepyfile("def test_plain(): pass")
    run_child("-W", "error").assert_outcomes(passed=1)


def test_it_can_be_left_out(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--gpu', type=int)")
    pytester.makepyfile("def test_theirs(request): assert request.config.getoption('gpu') == 3")
    pytester.runpytest_inprocess("-p", "no:ortgpu", "--gpu=3").assert_outcomes(passed=1)


@pytest.mark.parametrize("declared", [False, True])
def test_the_marker_is_registered(pytester: pytest.Pytester, run: Run, faked: Faked, declared: bool) -> None:
    if declared:
        pytester.makeini("[pytest]\nmarkers = gpu: ours")
    pytester.makepyfile(ONE_OF_EACH)
    run("--strict-markers", "--strict-config").assert_outcomes(passed=1, skipped=2)
    run("--markers").stdout.fnmatch_lines(["@pytest.mark.gpu(count=1, memory=None, compute_capability=None): needs*"])


# Markers


WRONG = {
    "memroy='8GiB'": "memroy is not known: there are count, memory, compute_capability",
    "2": "takes its values by name, not 2",
    "count=0": "count=0 is not a number of GPUs: a positive int",
    "count=True": "count=True is not a number of GPUs: a positive int",
    "count='2'": "count='2' is not a number of GPUs: a positive int",
    "memory='8'": 'memory=\'8\' is not an amount: bytes as an int, or a text like "8GiB" or "500 MB"',
    "memory='-1GiB'": 'memory=\'-1GiB\' is not an amount: bytes as an int, or a text like "8GiB" or "500 MB"',
    "memory=0": 'memory=0 is not an amount: bytes as an int, or a text like "8GiB" or "500 MB"',
    "memory=8.5": 'memory=8.5 is not an amount: bytes as an int, or a text like "8GiB" or "500 MB"',
    "compute_capability=8.0": "compute_capability=8.0 is not a pair of numbers like (8, 0)",
    "compute_capability=(8,)": "compute_capability=(8,) is not a pair of numbers like (8, 0)",
    "compute_capability='8.0'": "compute_capability='8.0' is not a pair of numbers like (8, 0)",
}


@pytest.mark.parametrize("mode", ["auto", "require", "skip"])
def test_wrong_markers_are_usage_errors(pytester: pytest.Pytester, run: Run, faked: Faked, mode: str) -> None:
    lines = ["import pytest", "def test_first(): print('a test ran')"]
    for number, wrong in enumerate(WRONG):
        lines += [f"@pytest.mark.gpu({wrong})", f"def test_{number}(): print('a test ran')"]
    path = pytester.makepyfile("\n".join(lines))
    result = run(f"--gpu={mode}", "-s")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = result.stderr.str() + result.stdout.str()
    for number, message in enumerate(WRONG.values()):
        assert f"{path.name}::test_{number}: @pytest.mark.gpu: {message}" in said
    assert "a test ran" not in said
    assert faked.looks == 0


def test_a_wrong_marker_above_a_right_one(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.gpu(cuont=2)

        @pytest.mark.gpu(count=1)
        def test_it(): pass
        """
    )
    result = run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "cuont is not known" in result.stderr.str() + result.stdout.str()


def test_the_closest_word_counts(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0), gpu(1), gpu(2))
    faked.memory = {f"GPU-{number}": (number * GiB, 8 * GiB) for number in range(3)}
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.gpu(count=3, compute_capability=(8, 0))

        @pytest.mark.gpu(memory="1GiB")
        class TestClass:
            def test_of_the_module(self, gpu_devices): assert 0, "three GPUs, and two have the memory"

            @pytest.mark.gpu(count=2)
            def test_of_the_function(self, gpu_devices): assert [gpu.ordinal for gpu in gpu_devices] == [1, 2]

        @pytest.mark.gpu
        def test_bare(gpu_devices): assert len(gpu_devices) == 3
        """
    )
    run().assert_outcomes(passed=2, skipped=1)


# Modes


def test_auto_skips_with_the_diagnosis(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    result = run()
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED [[]2[]] *: no GPU can be used: driver-unusable: cuInit returned 999"])
    assert faked.looks == 1


def test_require_fails_with_the_diagnosis(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    result = run("--gpu=require")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        [
            "no GPU can be used: driver-unusable: cuInit returned 999",
            "  - NVML sees 1 GPU(s)",
            "    reboot",
            "A GPU is required: --gpu=require",
        ]
    )
    assert result.stdout.str().count("NVML sees 1 GPU(s)") == 1, "the second failure need not say it again"


def test_require_fails_where_gpus_do_not_do(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0))
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu(count=2)
        def test_two(): pass

        @pytest.mark.gpu
        def test_one(): pass
        """
    )
    result = run("--gpu=require")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["needs 2 GPUs; CUDA shows cuda:0 (NVIDIA H200, GPU-0)", "A GPU is required: *"])


def test_require_lets_no_xfail_hide_it(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.xfail(reason="a test that fails")
        def test_it(): assert 0
        """
    )
    run("--gpu=require").assert_outcomes(errors=1)
    run("--gpu=auto").assert_outcomes(skipped=1)
    faked.has(gpu(0))
    run("--gpu=require").assert_outcomes(xfailed=1)


def test_skip_looks_for_nothing(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    result = run("--gpu=skip")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        ["gpu: none is looked for: --gpu=skip", "SKIPPED*: needs a GPU, and none is looked for: --gpu=skip"]
    )
    assert faked.looks == 0


@pytest.mark.parametrize("first", ["", "@pytest.hookimpl(trylast=True)", "@pytest.hookimpl(tryfirst=True)"])
def test_a_marker_that_a_conftest_adds_counts(pytester: pytest.Pytester, run: Run, faked: Faked, first: str) -> None:
    """A whole folder of tests is marked in this way; they would have passed on the CPU."""
    adds = "def pytest_collection_modifyitems(items):\n    for each in items: each.add_marker(pytest.mark.gpu({}))"
    pytester.makepyfile("def test_plain(): pass")
    pytester.makeconftest(f"import pytest\n{first}\n{adds.format('')}")
    run("--gpu=auto").assert_outcomes(skipped=1)
    run("--gpu=require").assert_outcomes(errors=1)
    faked.has(gpu(0))
    run("--gpu=require").assert_outcomes(passed=1)
    pytester.makeconftest(f"import pytest\n{first}\n{adds.format('memory=[]')}")
    assert run("--gpu=auto").ret == pytest.ExitCode.USAGE_ERROR


def test_a_test_that_is_skipped_anyway_needs_no_gpu(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.skip(reason="not today")
        def test_it(): pass
        """
    )
    run("--gpu=require", "-q").assert_outcomes(skipped=1)
    assert faked.looks == 0


def test_it_runs_where_there_is_a_gpu(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0))
    pytester.makepyfile(ONE_OF_EACH)
    for mode in ("auto", "require"):
        run(f"--gpu={mode}").assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("option", "variable", "ini", "mode", "source"),
    [
        ("skip", "require", "auto", "skip", "--gpu=skip"),
        (None, "skip", "require", "skip", "ORTGPU_GPU=skip"),
        (None, None, "skip", "skip", "gpu = skip in the ini file"),
        (None, "", "skip", "skip", "gpu = skip in the ini file"),
        ("require", "skip", "skip", "require", "--gpu=require"),
        (None, "require", "skip", "require", "ORTGPU_GPU=require"),
        (None, None, "require", "require", "gpu = require in the ini file"),
        ("auto", "require", "require", "auto", ""),
        (None, None, None, "auto", ""),
    ],
)
def test_command_line_before_variable_before_ini(
    pytester: pytest.Pytester,
    run: Run,
    faked: Faked,
    monkeypatch: pytest.MonkeyPatch,
    option: str | None,
    variable: str | None,
    ini: str | None,
    mode: str,
    source: str,
) -> None:
    if variable is not None:
        monkeypatch.setenv("ORTGPU_GPU", variable)
    if ini is not None:
        pytester.makeini(f"[pytest]\ngpu = {ini}")
    pytester.makepyfile(ONE_OF_EACH)
    result = run(*([f"--gpu={option}"] if option else []))
    result.assert_outcomes(passed=1, **{"errors" if mode == "require" else "skipped": 2})
    assert faked.looks == (mode != "skip")
    assert source in result.stdout.str()


@pytest.mark.parametrize("where", ["option", "variable", "ini"])
def test_an_unknown_mode_is_a_usage_error(
    pytester: pytest.Pytester, run_child: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    pytester.makepyfile("def test_it(): pass")
    if where == "variable":
        monkeypatch.setenv("ORTGPU_GPU", "always")
    if where == "ini":
        pytester.makeini("[pytest]\ngpu = always")
    result = run_child(*(["--gpu=always"] if where == "option" else []))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "always" in result.stderr.str()
    assert "require" in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


# The line below the header


def test_the_line_names_the_gpu(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    run().stdout.fnmatch_lines(["collected 3 items", "gpu: none: driver-unusable: cuInit returned 999"])
    faked.has(gpu(0), gpu(1))
    run().stdout.fnmatch_lines(["gpu: cuda:0 (NVIDIA H200, GPU-0), cuda:1 (NVIDIA H200, GPU-1)"])


@pytest.mark.parametrize("arguments", [["-m", "not gpu"], ["--collect-only"], ["-q", "-k", "plain"]])
def test_nothing_is_looked_for_without_need(
    pytester: pytest.Pytester, run: Run, faked: Faked, arguments: list[str]
) -> None:
    pytester.makepyfile(ONE_OF_EACH)
    result = run(*arguments)
    result.stdout.no_fnmatch_line("gpu: *")
    assert faked.looks == 0
    assert result.ret == 0


# Fixtures


def test_a_fixture_marks_its_test(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0))
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def model(gpu_session): return "model"

        def test_device(gpu_device): pass
        def test_session(gpu_session): pass
        def test_through_another(model): pass
        def test_plain(): pass
        """
    )
    run("-m", "gpu").assert_outcomes(passed=3, deselected=1)
    run("-m", "not gpu").assert_outcomes(passed=1, deselected=3)


def test_a_fixture_that_is_asked_for_late(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile("def test_it(request): request.getfixturevalue('gpu_session')")
    run("--gpu=auto").assert_outcomes(skipped=1)
    run("--gpu=require").assert_outcomes(failed=1)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.xfail(reason="a test that fails")
        def test_it(request): request.getfixturevalue("gpu_device")
        """
    )
    run("--gpu=require").assert_outcomes(failed=1)


def test_facts_of_the_device(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0, total_memory=80 * GiB), gpu(1))
    pytester.makepyfile(
        """
        import pytest
        from ortgpu import Device

        @pytest.mark.gpu(count=2)
        def test_it(gpu_device, gpu_devices):
            assert isinstance(gpu_device, Device) and gpu_device is gpu_devices[0]
            assert (gpu_device.ordinal, gpu_device.uuid, gpu_device.total_memory) == (0, "GPU-0", 80 * 2**30)
            assert gpu_devices[1].uuid == "GPU-1"
        """
    )
    run().assert_outcomes(passed=1)


def test_sessions_are_opened_on_the_gpu_and_closed(
    pytester: pytest.Pytester, run: Run, faked: Faked, sessions: list[str]
) -> None:
    faked.has(gpu(0, compute_capability=(7, 5)), gpu(1))
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu(compute_capability=(8, 0))
        def test_it(gpu_session):
            first = gpu_session("first", cpu_nodes="allow")
            assert first.options == {"cpu_nodes": "allow", "device": 1}
            gpu_session("second", device="cuda:0")
            gpu_session("third", None, ["CUDAExecutionProvider"], [{"device_id": 0}])
            gpu_session("fourth", providers=[("CUDAExecutionProvider", {"device_id": "0"})])
            gpu_session("fifth", providers=["CUDAExecutionProvider"])
            raise RuntimeError("closed all the same")
        """
    )
    run().assert_outcomes(failed=1)
    names = ["first", "second", "third", "fourth", "fifth"]
    devices = [1, "cuda:0", None, None, 1]
    assert sessions == [
        *(f"open {name} on {device}" for name, device in zip(names, devices, strict=True)),
        *(f"close {name}" for name in reversed(names)),
    ]


def test_the_cpu_is_no_gpu(sessions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "device", CPU)
    monkeypatch.setenv("ORTGPU_ALLOW_CPU", "1")
    with gpu_sessions() as open_session:
        with pytest.raises(ExecutionError, match="got one on the CPU") as raised:
            open_session("model")
        assert raised.value.evidence == ("ORTGPU_ALLOW_CPU=1",)
        open_session("meant", allow_cpu=True)
    assert sessions[-2:] == ["close meant", "close model"]


# GPU memory


class Memory:
    """What NVML says of memory: ``own`` is this process's use, None where it is not shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own: int | None = 600 * testing.MiB
        self.all: int | None = 900 * testing.MiB
        self.reads = 0
        self.after: dict[int, int] = {}  # own use from the n-th reading on
        monkeypatch.setattr(testing, "_memory_use", self.read)
        monkeypatch.setattr(testing, "_warm_up", lambda gpu: None)
        monkeypatch.setattr(testing, "_SETTLING", 0.3)

    def read(self, gpu: Device) -> testing._Use:
        self.reads += 1
        self.own = self.after.get(self.reads, self.own)
        return testing._Use(self.own, self.all)

    def take(self, size: int) -> None:
        self.own = None if self.own is None else self.own + size
        self.all = None if self.all is None else self.all + size


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


@pytest.mark.parametrize("shown", [True, False], ids=["process is shown", "process is not shown"])
def test_a_leak(memory: Memory, shown: bool) -> None:
    memory.own = memory.own if shown else None
    with gpu_leak_check([gpu(0)]):
        memory.take(testing.LEAK_MARGIN)
    left = r"GPU memory was left behind: 65 MiB more on cuda:0 .*; up to 64 MiB are no leak"
    with pytest.raises(AssertionError, match=left), gpu_leak_check([gpu(0)]):
        memory.take(testing.LEAK_MARGIN + testing.MiB)
    whose = "by this process" if shown else "by all processes"
    with pytest.raises(AssertionError, match=whose), gpu_leak_check([gpu(0)], margin=0):
        memory.take(1)


def test_other_processes_do_not_matter_where_this_one_is_shown(memory: Memory) -> None:
    with gpu_leak_check([gpu(0)], shared=True):
        memory.all = 140 * GiB


def test_memory_may_take_a_moment_to_come_back(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_SETTLING", 60.0)  # it ends with the reading that finds it back
    with gpu_leak_check([gpu(0)]):
        memory.take(GiB)
        memory.after = {4: 600 * testing.MiB}
    assert memory.reads == 4


def test_what_cannot_be_measured(memory: Memory) -> None:
    memory.own = None
    with (
        pytest.raises(UnmeasurableMemoryError, match="other processes use it too"),
        gpu_leak_check([gpu(0)], shared=True),
    ):
        pass
    memory.all = None
    with pytest.raises(UnmeasurableMemoryError, match="does not say how much"), gpu_leak_check([gpu(0)]):
        pass


def test_nvml_that_fails_meanwhile(memory: Memory) -> None:
    memory.own = None
    with pytest.raises(UnmeasurableMemoryError, match="no longer"), gpu_leak_check([gpu(0)]):
        memory.all = None


def test_what_was_raised_inside_is_not_replaced(memory: Memory) -> None:
    def run() -> None:
        with gpu_leak_check([gpu(0)]):
            memory.take(GiB)
            raise KeyError

    with pytest.raises(KeyError):
        run()


def test_what_warms_up_a_gpu() -> None:
    """The models are right, and the second time nothing is done. On the CPU, which takes the place of the GPU."""
    code = """
        import contextlib, onnxruntime
        from ortgpu import testing
        from ortgpu.devices import Device

        models = []

        @contextlib.contextmanager
        def on_the_cpu(device):
            cpu = ["CPUExecutionProvider"]
            yield lambda model: models.append(model) or onnxruntime.InferenceSession(model, providers=cpu)

        testing.gpu_sessions = on_the_cpu
        gpus = [Device("cuda", ordinal, None, None, None, None, None) for ordinal in (0, 0, 1)]
        for gpu in gpus:
            testing._warm_up(gpu)
        assert len(models) == 4, models
        """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, memory: Memory, sessions: list[str]) -> None:
    """Each object of the inner tests' class Held, and each session, holds a GiB while it lives or is open."""
    opened, closed = Session.__init__, Session.close

    def open_(self: Session, *arguments: Any, **options: Any) -> None:
        memory.take(GiB)
        opened(self, *arguments, **options)

    def close(self: Session) -> None:
        memory.take(-GiB)
        closed(self)

    monkeypatch.setattr(Session, "__init__", open_)
    monkeypatch.setattr(Session, "close", close)
    monkeypatch.setattr(testing, "hold", memory.take, raising=False)


LEAKS = """
    import gc
    import pytest
    from ortgpu.testing import hold

    class Held:
        def __init__(self): hold(2**30); self.itself = self
        def __del__(self): hold(-2**30)

    @pytest.fixture
    def value(gpu_device): return Held()

    kept = []
"""


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    ("body", "outcomes"),
    [
        ("def test_it(gpu_leak_check): kept.append(Held())", {"passed": 1, "errors": 1}),
        ("def test_it(gpu_leak_check): Held()", {"passed": 1}),
        ("def test_it(gpu_session, gpu_leak_check): gpu_session('model')", {"passed": 1}),
        ("def test_it(gpu_leak_check, gpu_session): gpu_session('model')", {"passed": 1}),
        ("def test_it(gpu_leak_check, value): pass", {"passed": 1}),
        ("def test_it(value, gpu_leak_check): pass", {"passed": 1}),
        ("def test_it(gpu_leak_check): held = Held(); assert 0", {"failed": 1}),
        ("def test_it(gpu_leak_check): kept.append(Held()); pytest.skip('no')", {"skipped": 1}),
    ],
)
def test_the_leak_check_of_a_test(
    pytester: pytest.Pytester, run: Run, faked: Faked, body: str, outcomes: dict[str, int]
) -> None:
    faked.has(gpu(0))
    pytester.makepyfile(dedent(LEAKS) + "\n" + body)
    result = run()
    result.assert_outcomes(**outcomes)
    if "errors" in outcomes:
        result.stdout.fnmatch_lines(
            [
                "*ERROR at teardown of test_it*",
                "GPU memory was left behind: 1.0 GiB more on cuda:0 (NVIDIA H200, GPU-0)*",
            ]
        )


def test_a_leak_check_that_cannot_look(pytester: pytest.Pytester, run: Run, faked: Faked, memory: Memory) -> None:
    memory.own = memory.all = None
    faked.has(gpu(0))
    pytester.makepyfile("def test_it(gpu_leak_check): pass")
    result = run()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*NVML does not say how much memory of cuda:0 * is in use"])
    run("--gpu=require").assert_outcomes(errors=1)


# What a test asks for


@pytest.mark.parametrize(
    ("written", "size"),
    [("8GiB", 8 * GiB), ("8 GiB", 8 * GiB), ("1.5gib", 3 * GiB // 2), ("500MB", 500_000_000), ("64 B", 64), (7, 7)],
)
def test_amounts_of_memory(written: object, size: int) -> None:
    assert GPURequirement.parse(memory=written).memory == size


def test_a_requirement_says_what_it_is() -> None:
    requirement = GPURequirement.parse(count=2, memory="8GiB", compute_capability=[8, 0])
    assert str(requirement) == "2 GPUs, 8.0 GiB of free memory, compute capability 8.0"
    assert str(GPURequirement()) == "1 GPU"


@pytest.mark.parametrize(
    ("first", "count", "chosen"),
    [(0, 1, [0]), (1, 1, [1]), (5, 1, [1]), (2, 2, [2, 3]), (3, 2, [3, 0]), (9, 4, [1, 2, 3, 0])],
)
def test_choosing_begins_with_a_number(first: int, count: int, chosen: list[int]) -> None:
    gpus = [gpu(number) for number in range(4)]
    assert [found.ordinal for found in choose_gpus(gpus, GPURequirement(count), first=first)] == chosen


def test_choosing_passes_over_what_does_not_do(faked: Faked) -> None:
    gpus = [gpu(0, compute_capability=(7, 5)), gpu(1), gpu(2), gpu(3, uuid=None, compute_capability=None)]
    faked.memory = {"GPU-0": (9 * GiB, 80 * GiB), "GPU-1": (GiB, 80 * GiB), "GPU-2": (9 * GiB, 80 * GiB)}
    requirement = GPURequirement(2, 8 * GiB, (8, 0))
    assert [found.ordinal for found in choose_gpus(gpus, requirement)] == [2, 3]  # what is unknown may do
    with pytest.raises(UnmetRequirementError) as raised:
        choose_gpus(gpus[:3], requirement)
    assert str(raised.value) == (
        "needs 2 GPUs, 8.0 GiB of free memory, compute capability 8.0; CUDA shows "
        "cuda:0 (NVIDIA H200, GPU-0): compute capability 7.5; "
        "cuda:1 (NVIDIA H200, GPU-1): 1.0 GiB of 80.0 GiB free; cuda:2 (NVIDIA H200, GPU-2)"
    )
    with pytest.raises(UnmetRequirementError, match="needs 1 GPU; CUDA shows none"):
        choose_gpus([], GPURequirement())


# With the plugins of others


def spread(pytester: pytest.Pytester, gpus: int) -> None:
    """Inner tests that write down which worker has which GPU, on a machine with so many."""
    pytester.makeconftest(
        f"""
        from ortgpu import testing
        from ortgpu.devices import Device

        gpus = tuple(
            Device("cuda", n, f"GPU-{{n}}", "NVIDIA H200", (9, 0), 1, "580.65.06") for n in range({gpus})
        )
        testing.find_gpus = lambda: testing.FoundGPUs(gpus, None)
        """
    )
    pytester.makepyfile(
        """
        import os, pathlib, pytest, time

        @pytest.mark.parametrize("number", range(8))
        def test_it(number, gpu_device):
            worker = os.environ["PYTEST_XDIST_WORKER"]
            pathlib.Path(f"{worker}-{gpu_device.ordinal}").touch()
            time.sleep(0.1)

        def test_plain(): pass
        """
    )


@pytest.mark.parametrize(("gpus", "expected"), [(2, {"gw0-0", "gw1-1"}), (1, {"gw0-0", "gw1-0"})])
def test_workers_are_spread_over_the_gpus(
    pytester: pytest.Pytester, run_child: Run, gpus: int, expected: set[str]
) -> None:
    pytest.importorskip("xdist")
    spread(pytester, gpus)
    result = run_child("-n", "2")
    result.assert_outcomes(passed=9)
    assert {path.name for path in pytester.path.glob("gw*-*")} == expected
    if gpus == 2:
        result.stdout.fnmatch_lines(
            ["gpu: gw0: cuda:0 (NVIDIA H200, GPU-0)", "gpu: gw1: cuda:1 (NVIDIA H200, GPU-1)"], consecutive=True
        )
    else:
        result.stdout.fnmatch_lines(["gpu: gw0, gw1: cuda:0 (NVIDIA H200, GPU-0)"])


def test_workers_refuse_wrong_markers(pytester: pytest.Pytester, run_child: Run) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu(cuont=2)
        def test_it(): print("a test ran")
        """
    )
    result = run_child("-n", "2", "-s")
    said = result.stdout.str() + result.stderr.str()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "INTERNALERROR" not in said
    assert "test_workers_refuse_wrong_markers.py::test_it: @pytest.mark.gpu: cuont is not known" in said
    assert "a test ran" not in said


# Machines of the lab: the driver and NVML are stubs, everything else is real


def run_on(machine: Machine, folder: Path, tests: str, *arguments: str, conftest: str = "") -> Any:
    """An inner run on a machine of the lab: outcomes by test, and what was loaded by whom."""
    (folder / "conftest.py").write_text(dedent(CONFTEST) + dedent(conftest), encoding="utf-8")
    (folder / "test_inner.py").write_text(dedent(tests), encoding="utf-8")
    command = ["-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-ra", *arguments]
    result = machine.run(argv=command, cwd=folder)
    assert result.json is not None, result.output
    return {**result.json, "output": result.output}


CONFTEST = """
    import json, os, sys

    outcomes, reasons = {}, {}

    def pytest_runtest_logreport(report):
        if report.when == "call" or not report.passed:
            name = report.nodeid.partition("::")[2]
            outcomes[name] = report.outcome
            reasons[name] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)

    def pytest_sessionfinish():
        maps = open("/proc/self/maps").read()
        loaded = [name for name in ("libcuda.so", "libnvidia-ml.so", "libonnxruntime", "libcudart.so") if name in maps]
        seen = {"outcomes": outcomes, "reasons": reasons, "loaded": loaded, "nvml": "pynvml" in sys.modules}
        with open(os.environ["LAB_REPORT"], "w") as file:
            json.dump(seen, file)
"""

# The stub driver opens no session: what is tested here comes after that.
SESSIONS_OPEN = """
    from ortgpu import testing

    really = testing.find_gpus
    testing.find_gpus = lambda: testing.FoundGPUs(really().gpus, None)
"""

SMALL = GPU("GPU-00000000-0000-0000-0000-0000000000aa", "NVIDIA T4", (7, 5), 16 * GiB, 15 * GiB)
LARGE = GPU("GPU-00000000-0000-0000-0000-0000000000bb", "NVIDIA H200", (9, 0), 141 * GiB, 140 * GiB)
TAKEN = GPU("GPU-00000000-0000-0000-0000-0000000000cc", "NVIDIA H200", (9, 0), 141 * GiB, 2 * GiB)


def test_nvml_is_well_and_cuda_is_broken(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(cuda=Cuda(init=999, devices=(LARGE,)), nvml=NVML((LARGE,)))
    seen = run_on(machine, tmp_path, ONE_OF_EACH)
    assert seen["outcomes"] == {"test_plain": "passed", "test_marked": "skipped", "test_fixture": "skipped"}
    assert "no GPU can be used: driver-unusable: " in seen["reasons"]["test_marked"]
    assert "gpu: none: driver-unusable: " in seen["output"]
    assert "libonnxruntime" not in seen["loaded"], "what is tried is tried in a child"
    assert "libcudart.so" not in seen["loaded"]


def test_a_driver_that_opens_no_session(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(cuda=Cuda(devices=(LARGE,)), nvml=NVML((LARGE,)))
    seen = run_on(machine, tmp_path, ONE_OF_EACH, "--gpu=require")
    assert seen["outcomes"] == {"test_plain": "passed", "test_marked": "failed", "test_fixture": "failed"}
    assert "no GPU can be used: " in seen["reasons"]["test_marked"]
    assert "500" in seen["output"]  # what the CUDA runtime says of the stub


def test_skip_touches_nothing(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(cuda=Cuda(devices=(LARGE,)), nvml=NVML((LARGE,)))
    seen = run_on(machine, tmp_path, ONE_OF_EACH, "--gpu=skip")
    assert seen["outcomes"] == {"test_plain": "passed", "test_marked": "skipped", "test_fixture": "skipped"}
    assert seen["loaded"] == []
    assert seen["nvml"] is False


def test_several_gpus(lab: Lab, tmp_path: Path) -> None:
    gpus = (SMALL, LARGE, TAKEN)
    machine = lab.machine(
        cuda=Cuda(devices=gpus), nvml=NVML(gpus), env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONHASHSEED": "0"}
    )
    tests = """
        import pytest

        def names(gpus): return [(gpu.ordinal, gpu.uuid[-2:]) for gpu in gpus]

        @pytest.mark.gpu(count=3)
        def test_all(gpu_devices): assert names(gpu_devices) == [(0, "aa"), (1, "bb"), (2, "cc")]

        @pytest.mark.gpu(compute_capability=(8, 0))
        def test_new(gpu_devices): assert names(gpu_devices) == [(1, "bb")]

        @pytest.mark.gpu(memory="16GiB")
        def test_large(gpu_device):
            assert (gpu_device.name, gpu_device.total_memory, gpu_device.compute_capability) == (
                "NVIDIA H200", 141 * 2**30, (9, 0)
            )

        @pytest.mark.gpu(memory="14GiB", count=2)
        def test_two(gpu_devices): assert names(gpu_devices) == [(0, "aa"), (1, "bb")]

        @pytest.mark.gpu(memory="3GiB", count=2, compute_capability=(8, 0))
        def test_none(): pass

        @pytest.mark.gpu(count=4)
        def test_four(): pass
        """
    seen = run_on(machine, tmp_path, tests, conftest=SESSIONS_OPEN)
    passed = dict.fromkeys(["test_all", "test_new", "test_large", "test_two"], "passed")
    assert seen["outcomes"] == {**passed, "test_none": "skipped", "test_four": "skipped"}, seen["reasons"]
    assert (
        "cuda:2 (NVIDIA H200, GPU-00000000-0000-0000-0000-0000000000cc): 2.0 GiB of 141.0 GiB free"
        in (seen["reasons"]["test_none"])
    )
    assert "needs 4 GPUs; CUDA shows cuda:0 (NVIDIA T4, " in seen["reasons"]["test_four"]
    assert "gpu: cuda:0 (NVIDIA T4, GPU-00000000-0000-0000-0000-0000000000aa), cuda:1 " in seen["output"]

    visible = machine.but(env={"CUDA_VISIBLE_DEVICES": LARGE.uuid})
    tests = """
        import pytest

        @pytest.mark.gpu(memory="16GiB")
        def test_one(gpu_devices): assert [(gpu.ordinal, gpu.uuid[-2:]) for gpu in gpu_devices] == [(0, "bb")]

        @pytest.mark.gpu(count=2)
        def test_two(): pass
        """
    seen = run_on(visible, tmp_path, tests, conftest=SESSIONS_OPEN)
    assert seen["outcomes"] == {"test_one": "passed", "test_two": "skipped"}, seen["reasons"]


def test_the_leak_check_asks_nvml(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(cuda=Cuda(devices=(LARGE,)), nvml=NVML((LARGE,)))
    tests = """
        import os
        import pytest
        from ortgpu import testing

        testing._warm_up = lambda gpu: None
        testing._SETTLING = 0.2

        def set_use(own, free):
            entry = "uuid=GPU-00000000-0000-0000-0000-0000000000bb|total=1000000000000|free=" + str(free)
            processes = f"|processes=1:5000000000,{os.getpid()}:{own}" if own else "|processes=1:5000000000"
            os.environ["STUB_NVML_GPUS"] = entry + processes

        @pytest.fixture(params=[True, False], ids=["shown", "not shown"])
        def shown(request):
            set_use(500_000_000 if request.param else None, 900_000_000_000)
            return request.param

        def test_leak(shown, gpu_leak_check): set_use(shown and 600_000_000, 899_900_000_000)
        def test_growth(shown, gpu_leak_check): set_use(shown and 550_000_000, 899_950_000_000)
        def test_others(shown, gpu_leak_check): set_use(shown and 500_000_000, 800_000_000_000)
        """
    seen = run_on(machine, tmp_path, tests, conftest=SESSIONS_OPEN)
    assert seen["outcomes"] == {
        "test_leak[shown]": "failed",
        "test_leak[not shown]": "failed",
        "test_growth[shown]": "passed",
        "test_growth[not shown]": "passed",
        "test_others[shown]": "passed",
        "test_others[not shown]": "failed",
    }, seen["output"]
    assert "95 MiB more on cuda:0" in seen["reasons"]["test_leak[shown]"]
    assert "(by this process)" in seen["reasons"]["test_leak[shown]"]
    assert "by all processes" in seen["reasons"]["test_leak[not shown]"]


# What is found


def test_find_gpus_needs_a_session_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis that found nothing wrong proves nothing by itself."""
    from ortgpu import diagnosis
    from ortgpu.diagnosis.probe import parse_report

    outputs = {
        "": "the interpreter said nothing",
        'ORTGPU-PROBE {"end": "session", "ok": true}\nORTGPU-PROBE {"done": true}': None,
    }
    for output, problem in outputs.items():
        probe = parse_report(output, 0, 1.0)
        found = diagnosis.Diagnosis((), None, probe)  # type: ignore[arg-type]  # no fact of it is looked at
        monkeypatch.setattr(diagnosis, "diagnose", lambda found=found, **_: found)
        result = testing.find_gpus()
        assert (result.problem is None) == (problem is None)
        assert [device.ordinal for device in result.gpus] == ([0] if problem is None else [])


def test_find_gpus_on_this_machine() -> None:
    """Whatever this machine is: GPUs or a problem, and this process stays as it was."""
    found = testing.find_gpus()
    assert found.gpus or found.problem is not None
    assert found.problem is None or isinstance(found.problem, GPUError)
    assert all(device.is_gpu for device in found.gpus)


def test_no_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = testing.find_gpus()
    assert found.gpus == ()
    assert found.problem is not None
    assert json.dumps(found.problem.as_dict())
    assert isinstance(found.problem, NoDeviceError) or found.problem.code != "no-device"
