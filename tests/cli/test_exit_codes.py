"""The exit codes of commands, and what commands pass on: scripts and CI look at nothing else.

The commands run in this process, over sessions and reports that are made up.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ortgpu
from ortgpu.__main__ import main
from ortgpu.environment.ranks import Rank
from ortgpu.errors import DriverNotFoundError, RankDeviceError
from tests.support.made_sessions import NEG, made_session

# Their commands have the same names, so the modules are taken from where they are listed.
check, exec_, preflight = (importlib.import_module(f"ortgpu.cli.{name}") for name in ("check", "exec", "preflight"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.onnx"
    path.write_bytes(NEG)
    return str(path)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each session that a command opens. The sessions count as sessions on a GPU."""
    calls: list[dict[str, Any]] = []

    def open_session(source: Any, **arguments: Any) -> Any:
        calls.append(arguments)
        return made_session(Path(source).read_bytes() if isinstance(source, str) else source)

    monkeypatch.setattr(ortgpu, "GPUSession", open_session)
    return calls


def test_check_passes_its_options_on(opened: list[dict[str, Any]], model: str) -> None:
    assert main(["check", "--runs", "0", model]) == 0
    assert main(["check", "--runs", "0", "--device", "1", "--cpu-nodes", "forbid", "--allow-cpu", model]) == 0
    assert opened == [
        {"device": None, "cpu_nodes": "warn", "allow_cpu": None},
        {"device": "1", "cpu_nodes": "forbid", "allow_cpu": True},
    ]


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("error", [DriverNotFoundError("no driver"), RuntimeError("an invalid model")])
def test_check_fails_where_the_session_does_not_open(
    error: Exception, options: list[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ortgpu, "GPUSession", raising(error))
    assert main(["check", *options, model]) == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(("wrong", "code"), [(None, 0), ("output 'y' is 0.3 of its largest value off", 1)])
def test_check_fails_where_results_are_wrong(
    wrong: str | None,
    code: int,
    options: list[str],
    opened: list[dict[str, Any]],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = SimpleNamespace(error=0.3, wrong=wrong)
    monkeypatch.setattr(check, "divergence", SimpleNamespace(compare_with_cpu=lambda *_: (compared, "the CPU")))
    assert main(["check", "--compare", "cpu", "--runs", "1", *options, model]) == code


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_check_fails_where_the_model_does_not_run_on_the_given_inputs(
    options: list[str], opened: list[dict[str, Any]], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Any = check.report.read

    def refused(session: Any, *arguments: Any) -> Any:
        return dataclasses.replace(read(session, *arguments), latency_error="refused")

    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, x=np.ones(3, np.float32))
    assert main(["check", *options, "--inputs", str(inputs), model]) == 0
    monkeypatch.setattr(check.report, "read", refused)
    assert main(["check", *options, "--inputs", str(inputs), model]) == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    ("errors", "together", "code"),
    [([None, "no room"], None, 0), (["no room"], None, 1), ([None], False, 1), ([None], True, 0)],
)
def test_check_fit_fails_where_nothing_fits(
    errors: list[str | None],
    together: bool | None,
    code: int,
    options: list[str],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fit(SimpleNamespace):
        def as_dict(self) -> dict[str, Any]:
            return {}

    rows = [SimpleNamespace(error=error) for error in errors]
    fit = Fit(models=[SimpleNamespace(rows=rows)], fit_together=together)
    monkeypatch.setattr(ortgpu, "fit", lambda *_, **__: fit)
    assert main(["check", model, "--fit", *options]) == code


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_preflight_fails_on_each_rank(number: int, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = preflight
    monkeypatch.setattr(module, "current_rank", lambda: Rank(number, 2, number, 2))
    monkeypatch.setattr(module, "run", raising(RankDeviceError("ranks 0, 1 have one GPU", ranks=(0, 1))))
    assert main(["preflight", *options]) == 1
    monkeypatch.setattr(module, "run", lambda *_, **__: None)
    monkeypatch.setattr(module, "_show_report", lambda *_: None)
    assert main(["preflight", *options]) == 0


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands that ``exec`` starts, with their variables. Nothing is started."""
    started: list[Any] = []
    module: Any = exec_
    monkeypatch.setattr(module.os, "execvpe", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    return started


def test_exec_puts_the_guard_in_force_for_the_command(executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTGPU_ENFORCE", raising=False)
    main(["exec", "--", "python", "app.py", "-I"])
    ((program, command, variables),) = executed
    assert (program, command) == ("python", ["python", "app.py", "-I"])
    assert variables["ORTGPU_ENFORCE"] == "1"
    assert variables["PYTHONPATH"].split(os.pathsep)[0].endswith(os.path.join("guard", "startup"))
    assert "ORTGPU_ENFORCE" not in os.environ


@pytest.mark.parametrize(
    "command", [["python", "-I", "app.py"], ["python3.12", "-sE", "-c", "pass"], ["/bin/pypy", "-W", "x", "-S"], [""]]
)
def test_exec_refuses_what_the_guard_does_not_reach(command: list[str], executed: list[Any]) -> None:
    assert main(["exec", "--", *command]) == 2
    assert executed == []


@pytest.mark.parametrize(
    ("error", "code"), [(FileNotFoundError, 127), (NotADirectoryError, 127), (PermissionError, 126), (OSError, 126)]
)
def test_exec_that_starts_nothing_has_the_codes_of_a_shell(
    error: type[OSError], code: int, executed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = exec_
    monkeypatch.setattr(module.os, "execvpe", raising(error("refused")))
    assert main(["exec", "--", "app"]) == code


def test_wrong_usage_is_2(model: str) -> None:
    assert main(["check", "--no-such-option", model]) == 2
    assert main(["check", "/no/such/model.onnx"]) == 2
    assert main(["check", "--plot", "x.png", model]) == 2
