"""What works with plain ONNX Runtime works with a GPUSession too, on a machine where sessions open on a GPU.

The CUDA provider is the real one, over libraries of CUDA that compute nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Machine
from tests.lab.fixtures import Lab
from tests.lab.installed import PLACES, older_than
from tests.support.children import program_path


@pytest.fixture(scope="module")
def machine(module_lab: Lab, provider_library: str) -> Machine:
    return module_lab.machine_that_places(provider_library)


@pytest.fixture
def run(machine: Machine) -> Any:
    def start(program: str, on: Machine = machine) -> Any:
        return on.run_program(program, behind="session.drop_in").ok().json

    return start


def test_a_provider_that_is_named_again(run: Any) -> None:
    found = run("session.drop_in.a_provider_that_is_named_again")
    for name, made in found.items():
        assert made["ours"] == made["guarded"] == made["plain"], name
        assert made["ours"][1] == 1, "one warning"
    assert found["with options"]["ours"][0][1] == str(64 << 20), "the first counts"


def test_the_warning_of_a_provider_that_is_named_again_points_to_the_caller(run: Any) -> None:
    found = run("session.drop_in.the_warning_of_a_provider_that_is_named_again_points_to_the_caller")
    assert (
        found
        == [[[program_path("session.drop_in"), "CPUExecutionProvider is named more than once: the first counts"]]] * 2
    )


# set_providers


def test_set_providers_with_other_options_of_cuda(run: Any) -> None:
    found = run("session.drop_in.set_providers_with_other_options_of_cuda")
    first, second = [["CUDAExecutionProvider", "CPUExecutionProvider"], str(64 << 20)], str(32 << 20)
    for name in ("plain", "ours", "guarded", "derived"):
        before, one, two, last, mine, *listed = found[name]
        assert before == first[0]
        assert (one, two) == (first, [first[0], second])
        assert last == "CPUExecutionProvider"
        assert mine == [name]
        assert listed in ([], [1]), "one session, listed once"
    assert found["kept"] == ["mine", "forbid", 8 << 20, None]


def test_set_providers_that_fails_changes_nothing(run: Any) -> None:
    found = run("session.drop_in.set_providers_that_fails_changes_nothing")
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    errors = ["ProviderRequestError"] * 5 + ["ProviderOptionError", "DeviceNotFoundError"]
    assert found == [[error, [providers, str(64 << 20)], True, [4]] for error in errors]


@pytest.mark.parametrize("allowed", [True, None])
def test_set_providers_never_moves_a_session_to_the_cpu(run: Any, machine: Machine, allowed: bool | None) -> None:
    """Neither with allow_cpu nor with its variable: the session that is there works on."""
    found = run(
        f"""
from unittest import mock
session = GPUSession(RELU, allow_cpu={allowed})
native = session._sess
from ortgpu.session import plan
with mock.patch.object(plan, "choose_visible", side_effect=ortgpu.NoDeviceError("the GPU is gone")):
    came = outcome(lambda: session.set_providers([CUDA]))
report([came, session._sess is native, str(session.device).partition(" ")[0], session._request.allow_cpu])
""",
        machine.but(env={**machine.env, "ORTGPU_ALLOW_CPU": "1"}),
    )
    assert found == ["NoDeviceError", True, "cuda:0", allowed]


def test_set_providers_gives_up_the_session_before(run: Any) -> None:
    found = run("session.drop_in.set_providers_gives_up_the_session_before")
    assert found == [True, ["CUDAExecutionProvider", "CPUExecutionProvider"]]


# The caller's SessionOptions


@pytest.mark.skipif(older_than(PLACES) is not None, reason=older_than(PLACES) or "")
def test_an_entry_of_the_callers_options_is_written_once(machine: Machine) -> None:
    """ONNX Runtime logs a warning for each entry that is written again, to take it back as well."""
    result = machine.run_program("session.drop_in.an_entry_of_the_callers_options_is_written_once").ok()
    found = result.json
    assert "will be overwritten" not in result.stderr
    for name in ("ours", "guarded"):
        assert found[f"{name}, None"] == ["1", True, True]
        assert found[f"{name}, 0"] == ["0", False, False]
        assert found[f"{name}, 1"] == ["1", True, True]
    assert found["refused"] == ["InvalidProtobuf", "1"]
    assert found["on the cpu"] == ["1", True]
    assert found["sent"] is True
    assert found["in threads"] == [20, True, "1"]


def test_what_set_providers_advises_for_a_name_that_nobody_has(run: Any) -> None:
    """Executed: without it the session is opened again, and with a name that was misspelt, with the right one."""
    found = run("session.drop_in.what_set_providers_advises_for_a_name_that_nobody_has")
    assert found[0] == ["leave 'InvalidProvider' out", "write 'CUDAExecutionProvider'"]
    assert found[1] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
