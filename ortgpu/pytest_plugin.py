"""Tests on a GPU: the marker ``ortgpu``, the fixtures ``gpu_session``, ``gpu_device``, ``gpu_devices`` and
``gpu_leak_check``, and the option ``--ortgpu``.

pytest loads this module at every start, so it imports next to nothing. Whether a GPU can be used is found out once, by
a child process that opens a session, and only if a test needs one. The pytest-free half is :mod:`ortgpu.testing`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from .devices import Device
    from .errors import GPUError
    from .session import GPUSession
    from .testing import FoundGPUs, GPURequirement

MODES = ("auto", "require", "skip")
VARIABLE = "ORTGPU_GPU"
FIXTURES = frozenset({"gpu_session", "gpu_device", "gpu_devices", "gpu_leak_check"})

_MARKER = (
    "ortgpu(count=1, memory=None, compute_capability=None): needs so many NVIDIA GPUs that work, each with this much "
    'free memory ("8GiB") and at least this compute capability ((8, 0)); see --ortgpu for where there are none'
)
_HELP = (
    "tests that need a GPU, where none can be used: 'auto' skips them with the diagnosis as the reason, 'require' "
    "fails them; 'skip' skips them everywhere and looks for no GPU. "
    f"Default: {VARIABLE}, then the ini setting ortgpu, then auto"
)

_LISTINGS = ("collectonly", "showfixtures", "show_fixtures_per_test")  # runs that collect tests and run none

# The entry point's name, and the module's for -p and PYTEST_PLUGINS: one module under two names.
_NAMES = ("ortgpu", "ortgpu.pytest_plugin")


class _AlreadyLoaded:
    """Takes the other name, because pytest ends with an error when it is told to register a module twice."""


class _State:
    """What this test run is about, found out when it is first asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self.mode, self.source = _resolve_mode(config)
        self.lines: dict[str, list[str]] = {}  # what workers of pytest-xdist found: which of them say the same
        worker = getattr(config, "workerinput", {})
        self.worker: str | None = worker.get("workerid")
        self.worker_count: int = worker.get("workercount", 1)
        self.wrong: dict[str, str] = {}  # markers that mean nothing, by test
        self.asked = False  # whether a test needed to know
        self.explained_by: str | None = None  # the test whose failure says all that the diagnosis knows
        self._found: FoundGPUs | None = None

    @property
    def worker_number(self) -> int:
        digits = re.search(r"\d+$", self.worker or "")
        return int(digits[0]) if digits else 0

    def look(self) -> FoundGPUs:
        if self._found is None:
            from .testing import find_gpus

            self._found = find_gpus()
        return self._found

    @property
    def usage_error(self) -> str | None:
        if not self.wrong:
            return None
        lines = [f"{test}: @pytest.mark.ortgpu: {error}" for test, error in self.wrong.items()]
        return "\n".join(lines)

    def line(self) -> str:
        """Which GPU, or why none."""
        if self.mode == "skip":
            return f"none is looked for: {self.source}"
        found = self.look()
        if found.problem is not None:
            return f"none: {_short(found.problem)}"
        gpus = found.gpus
        if self.worker is not None:
            gpus = (gpus[self.worker_number % len(gpus)],)
        return ", ".join(str(gpu) for gpu in gpus)


_STATE = pytest.StashKey[_State]()
_REQUIREMENT = pytest.StashKey["GPURequirement"]()
_GPUS = pytest.StashKey["tuple[Device, ...]"]()
_REFUSED = pytest.StashKey[bool]()
_UNMET = pytest.StashKey[bool]()
_PASSED = pytest.StashKey[bool]()


# Settings


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    for name in _NAMES:
        if not pluginmanager.has_plugin(name):
            pluginmanager.register(_AlreadyLoaded(), name)
    parser.getgroup("ortgpu").addoption("--ortgpu", choices=MODES, default=None, help=_HELP)
    parser.addini("ortgpu", f"the default of --ortgpu: {', '.join(MODES)}", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    config.stash[_STATE] = _State(config)


def _resolve_mode(config: pytest.Config) -> tuple[str, str]:
    """The mode, and who set it: the command line before the variable before the ini file."""
    given = {
        "--ortgpu={}": config.getoption("ortgpu", None),
        VARIABLE + "={}": os.environ.get(VARIABLE),
        "ortgpu = {} in the ini file": config.getini("ortgpu"),
    }
    for source, value in given.items():
        if not value:
            continue
        if value not in MODES:
            raise pytest.UsageError(f"{source.format(value)}: not one of {', '.join(MODES)}")
        return value, source.format(value)
    return "auto", "by default"


# Which tests need a GPU, and what of


# Wrappers are of the kind that pluggy had first: the plugin is loaded by whatever pytest is there, and what that does
# not know would end every run.
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    _read_markers(config, items)  # before -m selects
    yield
    _read_markers(config, items)  # and those that the project's own hook has added


def _read_markers(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ortgpu") is None and _uses_our_fixtures(item):
            item.add_marker(pytest.mark.ortgpu)
        if item.get_closest_marker("ortgpu") is not None:
            try:
                item.stash[_REQUIREMENT] = _requirement(item)
            except ValueError as error:
                config.stash[_STATE].wrong[item.nodeid] = str(error)


def _uses_our_fixtures(item: pytest.Item) -> bool:
    """A project may have fixtures of the same names, in the place of ours or around them."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return any(_is_ours(name, definitions[name]) for name in FIXTURES.intersection(definitions))


def _is_ours(name: str, definitions: Sequence[pytest.FixtureDef[Any]]) -> bool:
    for definition in reversed(definitions):  # the last is used, and those before it if it asks for them
        if definition.func.__module__ == __name__:
            return True
        if name not in definition.argnames:
            return False
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    error = session.config.stash[_STATE].usage_error
    if error is not None:
        raise pytest.UsageError(error)


def _requirement(item: pytest.Item) -> GPURequirement:
    """The markers of a test taken together: of a function, its class and its module, the closest word counts."""
    from .testing import GPURequirement

    wanted: dict[str, object] = {}
    for mark in item.iter_markers("ortgpu"):
        if mark.args:
            raise ValueError(f"takes its values by name, not {', '.join(map(repr, mark.args))}")
        GPURequirement.parse(**mark.kwargs)
        wanted = {**mark.kwargs, **wanted}
    return GPURequirement.parse(**wanted)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    """Looks for GPUs before the test: pytest-timeout would count it, and pytest-forked would do it for each test."""
    state = item.config.stash[_STATE]
    if _REQUIREMENT in item.stash and item.get_closest_marker("skip") is None and state.mode != "skip":
        state.look()
    yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_REFUSED] = item.stash[_UNMET] = False  # pytest-rerunfailures may have it try again
    if _REQUIREMENT in item.stash:
        _give_gpus(item)


def _give_gpus(item: pytest.Item) -> tuple[Device, ...]:
    """The GPUs of this test; or skips it, or fails it."""
    if _GPUS not in item.stash:
        from .testing import GPURequirement, UnmetRequirementError, choose_gpus

        state = item.config.stash[_STATE]
        state.asked = True
        if state.mode == "skip":
            pytest.skip(f"needs a GPU, and none is looked for: {state.source}")
        found = state.look()
        unusable = found.problem is not None and f"no GPU can be used: {_short(found.problem)}"
        if unusable and not found.gpus:
            _refuse(item, unusable, found.problem)
        try:
            gpus = choose_gpus(found.gpus, item.stash.get(_REQUIREMENT, GPURequirement()), first=state.worker_number)
        except UnmetRequirementError as error:
            _refuse(item, str(error))
        if unusable:
            _refuse(item, unusable, found.problem)
        item.stash[_GPUS] = gpus
    return item.stash[_GPUS]


def _refuse(item: pytest.Item, reason: str, problem: GPUError | None = None) -> NoReturn:
    state = item.config.stash[_STATE]
    if state.mode != "require":
        item.stash[_UNMET] = problem is None
        pytest.skip(reason)
    item.stash[_REFUSED] = True
    details: list[str] = []
    # Once is enough: the fiftieth test has the same reason. But of a test that is tried again, only the last is shown.
    if problem is not None and state.explained_by in (None, item.nodeid):
        state.explained_by = item.nodeid
        details = str(problem).splitlines()[1:]
    raise _failed("\n".join([reason, *details, f"A GPU is required: {state.source}"])) from None


def _failed(reason: str) -> BaseException:
    """What pytest.fail raises, which would be shown with what it was raised for: the reason says that."""
    return pytest.fail.Exception(reason, pytrace=False)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # outermost: xfail has had its say
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    report: pytest.TestReport = (yield).get_result()
    if call.when == "call":
        item.stash[_PASSED] = call.excinfo is None
    if call.excinfo is not None and item.stash.get(_REFUSED, False):
        # An xfail marker speaks of the test, and there was no test: `require` lets nothing pass in silence.
        report.outcome = "failed"
        report.__dict__.pop("wasxfail", None)
    if report.skipped and isinstance(report.longrepr, tuple) and item.stash.get(_UNMET, False):
        # Not the line above that skips: which test it is would not be said
        path, line, _ = item.reportinfo()
        report.longrepr = (os.fspath(path), (line or 0) + 1, report.longrepr[2])


# Fixtures


@pytest.fixture
def gpu_devices(request: pytest.FixtureRequest) -> tuple[Device, ...]:
    """The GPUs of this test, as many as its marker asks for. Each is an ``ortgpu.Device``."""
    return _give_gpus(request.node)


@pytest.fixture
def gpu_device(gpu_devices: tuple[Device, ...]) -> Device:
    """The GPU of this test, the first where it has several: ordinal, uuid, name, compute_capability, total_memory."""
    return gpu_devices[0]


@pytest.fixture
def gpu_session(request: pytest.FixtureRequest, gpu_device: Device) -> Iterator[Callable[..., GPUSession]]:
    """Opens sessions: ``gpu_session(model, **options)`` is a GPUSession on this test's GPU, closed after the test.

    It takes what GPUSession takes and raises what that raises; ``device=`` names another GPU. A session that only
    ORTGPU_ALLOW_CPU let onto the CPU is refused, with ExecutionError.
    """
    from .testing import gpu_sessions

    if "gpu_leak_check" in request.fixturenames:
        request.getfixturevalue("gpu_leak_check")  # set up before, so torn down after the sessions are closed
    with gpu_sessions(device=gpu_device.ordinal) as open_session:
        yield open_session


@pytest.fixture
def gpu_leak_check(request: pytest.FixtureRequest, gpu_devices: tuple[Device, ...]) -> Iterator[None]:
    """Fails a test that leaves GPU memory behind: more than 64 MiB on one of its GPUs.

    A test of which that cannot be measured is skipped, or fails with ``--ortgpu=require``. What another process takes
    of the GPU meanwhile counts as well where NVML shows no processes, as in many containers.
    """
    from . import testing

    node, state = request.node, request.config.stash[_STATE]
    try:
        with testing.gpu_leak_check(gpu_devices, shared=state.worker_count > len(state.look().gpus)):
            yield
            if not node.stash.get(_PASSED, False):  # failed, or Ctrl-C: what is torn down then is none of its doing
                raise _TestFailedError
            node.funcargs.clear()  # pytest holds the values of fixtures longer than the fixtures
    except _TestFailedError:
        pass
    except testing.UnmeasurableMemoryError as error:
        _refuse(node, str(error))
    except AssertionError as error:
        raise _failed(str(error)) from None


class _TestFailedError(Exception):
    """Its traceback refers to what the test used: nothing can be said of leaks."""


# What is said


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    """One line below the header, if there are tests that need a GPU: otherwise none is looked for."""
    needed = any(_REQUIREMENT in item.stash for item in items)
    if not needed or any(config.getoption(name, False) for name in _LISTINGS) or config.getoption("verbose") < 0:
        return None
    return f"ortgpu: {config.stash[_STATE].line()}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    output, state = getattr(session.config, "workeroutput", None), session.config.stash[_STATE]
    if output is not None:
        output["ortgpu"] = {"usage_error": state.usage_error, "line": state.line() if state.asked else None}


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist: a worker has ended, and what it has to say arrives
def pytest_testnodedown(node: Any) -> None:
    said = getattr(node, "workeroutput", {}).get("ortgpu", {})
    if said.get("usage_error"):
        raise pytest.UsageError(said["usage_error"])
    if said.get("line"):
        node.config.stash[_STATE].lines.setdefault(said["line"], []).append(node.gateway.id)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line, workers in sorted(config.stash[_STATE].lines.items(), key=lambda entry: entry[1]):
        terminalreporter.write_line(f"ortgpu: {', '.join(sorted(workers))}: {line}")


def _short(problem: GPUError) -> str:
    return f"{problem.code}: {problem.summary}"
