"""A pytest plugin for tests on a GPU.

It has the marker ``ortgpu``, the option ``--ortgpu``, and the fixtures ``gpu_session``, ``gpu_device``, ``gpu_devices``
and ``gpu_leak_check``. pytest loads this module in every project of an environment, so the module imports almost
nothing, and does nothing if no test uses these names. If a test needs a GPU, a child process opens a session once to
try the GPU. :mod:`ortgpu.testing` is the part without pytest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from .errors import GPUError
    from .provider.devices import Device
    from .session.gpu_session import GPUSession
    from .testing import FoundGPUs, GPURequirement

MARKER = "ortgpu"
MODES = ("auto", "require", "skip", "cpu")
VARIABLE = "ORTGPU_GPU"
FIXTURES = frozenset({"gpu_session", "gpu_device", "gpu_devices", "gpu_leak_check"})

_HELP_OF_MARKER = (
    "ortgpu(count=1, memory=None, compute_capability=None, allow_cpu=False): needs so many NVIDIA GPUs that work, each "
    'with this much free memory ("8GiB") and at least this compute capability ((8, 0)). Where no GPU works, --ortgpu '
    "decides; with ORTGPU_ALLOW_CPU=1 a test with allow_cpu=True runs on the CPU"
)
_HELP = (
    "tests that need a GPU, where none can be used: 'auto' skips them with the diagnosis as the reason, 'require' "
    "fails them, 'cpu' runs them on the CPU, for which ORTGPU_ALLOW_CPU must be 1; 'skip' skips them everywhere and "
    "looks for no GPU. "
    f"Default: {VARIABLE}, then the ini setting ortgpu, then auto"
)

# With these options pytest runs no tests.
_LISTINGS = ("collectonly", "showfixtures", "show_fixtures_per_test")

# The names of this plugin: the name of the entry point, and the name of the module for -p and PYTEST_PLUGINS.
_NAMES = ("ortgpu", "ortgpu.pytest_plugin")


class _Run:
    """The mode of this test run, and its GPUs. The search for GPUs begins when a test first needs one."""

    def __init__(self, config: pytest.Config) -> None:
        self.mode, self.source = _resolve_mode(config)
        if self.mode == "cpu" and not _cpu_is_allowed():
            raise pytest.UsageError(f"{self.source}: set ORTGPU_ALLOW_CPU=1, too, which allows sessions on the CPU")
        self.explained_by: str | None = None  # This test's failure shows the whole diagnosis.
        worker = getattr(config, "workerinput", {})  # Only pytest-xdist sets this attribute.
        self.worker_count: int = worker.get("workercount", 1)
        number = re.search(r"\d+$", worker.get("workerid", ""))
        self.worker_number = int(number[0]) if number else 0
        self._testrun: str | None = worker.get("testrunuid")
        self._folder, name = os.path.split(config.getoption("basetemp", None) or "")
        # Workers of pytest-xdist on this host share the result of the search.
        self._shares = self._testrun is not None and name.startswith("popen-")
        self._found: FoundGPUs | None = None

    def look(self) -> FoundGPUs:
        if self._found is None:
            from .testing import find_gpus

            self._found = self._look_once(find_gpus) if self._shares else find_gpus()
        return self._found

    def _look_once(self, find_gpus: Callable[[], FoundGPUs]) -> FoundGPUs:
        """Look for GPUs in the first worker, and share the result with workers that see the same GPUs."""
        shown = sorted(entry for entry in os.environ.items() if entry[0].startswith(("CUDA_", "NVIDIA_")))
        key = hashlib.sha256(repr((self._testrun, sys.prefix, shown)).encode()).hexdigest()
        if sys.platform == "win32":
            return find_gpus()
        try:
            with open(os.path.join(self._folder, f"ortgpu-{key[:16]}"), "a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                result: FoundGPUs
                try:
                    result = pickle.load(file)  # noqa: S301 - pytest made this folder for this user alone
                except (EOFError, pickle.UnpicklingError):
                    result = find_gpus()
                    pickle.dump(result, file)
                return result
        except OSError:  # The file system has no locks, or the disk is full.
            return find_gpus()

    def line(self) -> str:
        if self.mode == "skip":
            return f"none is looked for: {self.source}"
        result = self.look()
        if result.problem is not None:
            return f"none{', tests run on the CPU' if self.mode == 'cpu' else ''}: {_short(result.problem)}"
        return ", ".join(map(str, result.gpus))


_RUN = pytest.StashKey[_Run]()
_GPUS = pytest.StashKey["tuple[Device, ...]"]()
_REFUSED = pytest.StashKey[bool]()
_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    for name in _NAMES:
        if not pluginmanager.has_plugin(name):
            pluginmanager.register(object(), name)  # Otherwise pytest fails if it loads this module twice.
    parser.getgroup("ortgpu").addoption("--ortgpu", choices=MODES, default=None, help=_HELP)
    parser.addini("ortgpu", f"the default of --ortgpu: {', '.join(MODES)}", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _HELP_OF_MARKER)
    config.stash[_RUN] = _Run(config)


def _resolve_mode(config: pytest.Config) -> tuple[str, str]:
    """Return the mode and its source. The command line comes first, then the variable, then the ini file."""
    settings = {
        "--ortgpu={}": config.getoption("ortgpu", None),
        VARIABLE + "={}": os.environ.get(VARIABLE),
        "ortgpu = {} in the ini file": config.getini("ortgpu"),
    }
    for source, value in settings.items():
        if not value:
            continue
        if value not in MODES:
            raise pytest.UsageError(f"{source.format(value)}: not one of {', '.join(MODES)}")
        return value, source.format(value)
    return "auto", "by default"


@pytest.hookimpl(tryfirst=True)  # The marker must be there before -m selects tests.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        used = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        # A project's own fixture with the name of one of ours does not count.
        if not _is_marked(item) and any(_is_ours(name, used[name]) for name in FIXTURES.intersection(used)):
            item.add_marker(MARKER)


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARKER) is not None


def _is_ours(name: str, definitions: Sequence[pytest.FixtureDef[Any]]) -> bool:
    for definition in reversed(definitions):  # pytest uses the last definition, and earlier ones on its request.
        if definition.func.__module__ == __name__:
            return True
        if name not in definition.argnames:
            return False
    return False


def _cpu_is_allowed() -> bool:
    # This import is not at the top, because pytest loads this module in every project.
    from .session.request import cpu_is_allowed_by_variable

    return cpu_is_allowed_by_variable()


def _requirement(item: pytest.Item) -> GPURequirement:
    """Combine the markers of a test, its class and its module. For each value the closest marker counts."""
    from .testing import GPURequirement

    values: dict[str, object] = {}
    try:
        for mark in item.iter_markers(MARKER):
            if mark.args:
                raise ValueError(f"takes its values by name, not {', '.join(map(repr, mark.args))}")
            GPURequirement.parse(**mark.kwargs)
            values = {**mark.kwargs, **values}
        return GPURequirement.parse(**values)
    except ValueError as error:
        item.stash[_REFUSED] = True
        raise _failed(f"@pytest.mark.{MARKER}: {error}") from None


# Hook wrappers of the old kind, because every release of pytest must be able to load this plugin.
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    """Look for GPUs before the test, outside the time limit of pytest-timeout and the child of pytest-forked."""
    run = item.config.stash[_RUN]
    if _is_marked(item) and item.get_closest_marker("skip") is None and run.mode != "skip":
        run.look()
    yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_marked(item):
        _give_gpus(item)


def _give_gpus(item: pytest.Item) -> tuple[Device, ...]:
    if _GPUS not in item.stash:
        requirement = _requirement(item)
        run = item.config.stash[_RUN]
        if run.mode == "skip":
            _refuse(item, f"needs a GPU, and none is looked for: {run.source}")
        from .testing import UnmetRequirementError, choose_gpus

        result = run.look()
        unusable = result.problem is not None and f"no GPU can be used: {_short(result.problem)}"
        if unusable and (run.mode == "cpu" or (run.mode == "auto" and requirement.allow_cpu and _cpu_is_allowed())):
            from .provider.devices import CPU

            item.stash[_GPUS] = (CPU,) * requirement.count
            return item.stash[_GPUS]
        if unusable and not result.gpus:
            _refuse(item, unusable, result.problem)
        try:
            gpus = choose_gpus(result.gpus, requirement, first=run.worker_number)
        except UnmetRequirementError as error:
            _refuse(item, str(error))
        if unusable:
            _refuse(item, unusable, result.problem)
        item.stash[_GPUS] = gpus
    return item.stash[_GPUS]


def _refuse(item: pytest.Item, reason: str, problem: GPUError | None = None) -> NoReturn:
    run = item.config.stash[_RUN]
    item.stash[_REFUSED] = True
    if run.mode != "require":
        pytest.skip(reason)
    details: list[str] = []
    # Show the details once, not for every test. A test that is retried shows them again, as only its last try is seen.
    if problem is not None and run.explained_by in (None, item.nodeid):
        run.explained_by = item.nodeid
        details = str(problem).splitlines()[1:]
    raise _failed("\n".join([reason, *details, f"A GPU is required: {run.source}"])) from None


def _failed(reason: str) -> BaseException:
    return pytest.fail.Exception(reason, pytrace=False)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # As the outermost wrapper it sees the report after xfail.
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    report: pytest.TestReport = (yield).get_result()
    if call.when == "call":
        item.stash[_PASSED] = call.excinfo is None
    if call.excinfo is None or not item.stash.get(_REFUSED, False):
        return
    item.stash[_REFUSED] = False  # pytest-rerunfailures may retry the test.
    # A skipped test is reported with its own line, not with the line of pytest.skip above.
    if isinstance(report.longrepr, tuple):
        path, line, _ = item.reportinfo()
        report.longrepr = (os.fspath(path), (line or 0) + 1, report.longrepr[2])
    else:  # The test did not run. With `require` an xfail marker must not hide that.
        report.outcome = "failed"
        report.__dict__.pop("wasxfail", None)


@pytest.fixture
def gpu_devices(request: pytest.FixtureRequest) -> tuple[Device, ...]:
    """Return the GPUs of this test as ``ortgpu.Device`` objects. Their number is the ``count`` of its marker.

    If there is no GPU and the test may run on the CPU, each entry is the CPU.
    """
    return _give_gpus(request.node)


@pytest.fixture
def gpu_device(gpu_devices: tuple[Device, ...]) -> Device:
    """Return the first GPU of this test: ordinal, uuid, name, compute_capability, total_memory in bytes."""
    return gpu_devices[0]


@pytest.fixture
def gpu_session(request: pytest.FixtureRequest, gpu_device: Device) -> Iterator[Callable[..., GPUSession]]:
    """Open sessions: ``gpu_session(model, **options)`` is a GPUSession on this test's GPU, closed after the test.

    It takes the arguments of GPUSession and raises its errors. ``device=`` names another GPU. If ORTGPU_ALLOW_CPU puts
    a session on the CPU, it raises ExecutionError, unless the marker or the option lets the test run there.
    """
    from .testing import gpu_sessions

    if "gpu_leak_check" in request.fixturenames:
        request.getfixturevalue("gpu_leak_check")  # Set up first, it ends after the sessions.
    with gpu_sessions(device=gpu_device.ordinal, allow_cpu=not gpu_device.is_gpu) as open_session:
        yield open_session


@pytest.fixture
def gpu_leak_check(request: pytest.FixtureRequest, gpu_devices: tuple[Device, ...]) -> Iterator[None]:
    """Fail a test that leaves more than 64 MiB of memory in use on one of its GPUs.

    If this cannot be measured, the test is skipped, or fails with ``--ortgpu=require``. If NVML shows no processes, as
    in many containers, memory that another process takes meanwhile counts too.
    """
    from . import testing

    node, run = request.node, request.config.stash[_RUN]
    if not gpu_devices[0].is_gpu:
        yield
        return
    try:
        with contextlib.ExitStack() as check:
            check.enter_context(testing.gpu_leak_check(gpu_devices, shared=run.worker_count > len(run.look().gpus)))
            yield
            if node.stash.get(_PASSED, False):
                node.funcargs.clear()  # Otherwise pytest holds the values of fixtures longer.
            else:  # The test failed or was interrupted. Its traceback holds its objects, so leaks cannot be judged.
                check.pop_all()
    except testing.UnmeasurableMemoryError as error:
        _refuse(node, str(error))
    except AssertionError as error:
        raise _failed(str(error)) from None


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    """Return a line about the GPUs if a test needs one. pytest shows it below the header."""
    if any(config.getoption(name, False) for name in _LISTINGS) or config.getoption("verbose") < 0:
        return None
    return f"ortgpu: {config.stash[_RUN].line()}" if any(map(_is_marked, items)) else None


def _short(problem: GPUError) -> str:
    return f"{problem.code}: {problem.summary}"
