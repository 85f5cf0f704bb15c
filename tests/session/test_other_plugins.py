"""CUDA by a plugin whose provider has a name of its own: the real provider's file with another name in it.

The sessions are over the lab's CUDA libraries, which compute nothing. nxrt-ep-cuda 0.1.0.dev6 is such a plugin.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.environment.gpu.cuda import CudaState
from ortgpu.errors import ProviderFallbackError
from ortgpu.running.onnxruntimes import InferenceSession
from ortgpu.session import other_plugins as other_plugins_module
from tests.behaviour.test_plugins import REGISTER, seen
from tests.lab import Cuda, Machine
from tests.lab.fixtures import Lab, provider_library
from tests.support.other_cuda_plugins import NAME, renamed

other_plugins: Any = other_plugins_module

FILE = "plugin/libonnx_runtime_ep_cuda_plugin.so"
BY_DEVICE = """
options = onnxruntime.SessionOptions()
listed = [device for device in onnxruntime.get_ep_devices() if device.ep_name == {name!r}]
options.add_provider_for_devices([listed[{number}]], {{}})
"""


@pytest.fixture(scope="module")
def machine(module_lab: Lab) -> Machine:
    """The CPU package, two GPUs, and the plugin as a file that the program registers."""
    machine = module_lab.machine_with_plugin(packaged=False, gpus=2)
    content = renamed(provider_library())
    if content is None:
        pytest.skip("the installed provider has its name in other places of its file")
    machine.overlay.remove("plugin").replace(FILE, content)
    return machine


def registering(code: str) -> str:
    return "NAME, FOLDER = 'cuda_ep', 'plugin'" + REGISTER.replace("*providers_cuda*", "lib*") + code


def tried(machine: Machine, call: str, *, number: int = 0, guard: bool = False, **env: str) -> Any:
    code = BY_DEVICE.format(name=NAME, number=number)
    code += f"import warnings; warnings.simplefilter('ignore')\n{'ortgpu.install()' if guard else ''}\n"
    return seen(machine, registering(code + f"attempt(lambda: {call})"), env=env)


def test_a_session_that_carries_its_device_is_verified(machine: Machine, module_lab: Lab) -> None:
    model = str(module_lab.models.relu)
    for number in (0, 1):
        found = tried(machine, f"ortgpu.GPUSession({model!r}, options)", number=number)
        assert found.get("providers") == [NAME, "CPUExecutionProvider"], found
        assert found["device"].startswith(f"cuda:{number} ")


def test_its_nodes_are_on_the_gpu(machine: Machine, module_lab: Lab) -> None:
    code = BY_DEVICE.format(name=NAME, number=0) + (
        f"session = ortgpu.GPUSession({str(module_lab.models.relu)!r}, options, cpu_nodes='forbid')\n"
        "(record,) = ortgpu.sessions()\n"
        "report([dict(session.placement.by_provider), record.kind, str(record.device)[:6], repr(session)[:11]])\n"
        "session.close()"
    )
    assert seen(machine, registering(code)) == [{NAME: 1}, "GPUSession", "cuda:0", "<GPUSession"]


def test_another_gpu_than_the_one_that_is_carried(machine: Machine, module_lab: Lab) -> None:
    found = tried(machine, f"ortgpu.GPUSession({str(module_lab.models.relu)!r}, options, device=1)")
    assert found["error"] == "ProviderRequestError"
    assert "different GPUs" in found["text"]


@pytest.mark.parametrize("guard", [False, True])
def test_a_session_that_does_not_carry_it_says_what_was_found(machine: Machine, module_lab: Lab, guard: bool) -> None:
    made = "onnxruntime.InferenceSession" if guard else "ortgpu.GPUSession"
    call = f"{made}({str(module_lab.models.relu)!r})"
    found = tried(machine, call, guard=guard)
    assert found["error"] == "ProviderFallbackError"
    assert f"CUDA is here as the plugin {NAME}" in found["text"]
    assert "built without CUDA" not in found["text"]
    assert "add_provider_for_devices" in found["fixes"][0]
    allowed = tried(machine, call, guard=guard, ORTGPU_ALLOW_CPU="1")
    assert allowed["providers"] == ["CPUExecutionProvider"], allowed


def test_the_fix_of_that_error_opens_the_session(machine: Machine, module_lab: Lab) -> None:
    code = f"""
from ortgpu import GPUSession
model = {str(module_lab.models.relu)!r}
try:
    GPUSession(model)
except ortgpu.GPUError as error:
    fix, _ = error.fixes
    exec(fix)
    session = GPUSession(model, options)
    report([fix.kind, session.get_providers(), str(session.device)[:6]])
"""
    assert seen(machine, registering(code)) == ["python", [NAME, "CPUExecutionProvider"], "cuda:0"]


def test_a_driver_that_does_not_work(machine: Machine, module_lab: Lab) -> None:
    """Its error, and not one about packages."""
    call = f"ortgpu.GPUSession({str(module_lab.models.relu)!r}, options)"
    found = tried(machine.but(cuda=Cuda(init=999)), call)
    assert found["error"] == "DriverUnusableError", found


def test_the_guard_lets_a_session_on_it_pass(machine: Machine, module_lab: Lab) -> None:
    call = f"onnxruntime.InferenceSession({str(module_lab.models.relu)!r}, options)"
    code = BY_DEVICE.format(name=NAME, number=0) + (
        f"ortgpu.install()\nsession = {call}\n"
        "report([session.get_providers(), [record.kind for record in ortgpu.sessions()]])"
    )
    assert seen(machine, registering(code)) == [[NAME, "CPUExecutionProvider"], ["other"]]


# Judgement, with devices and sessions that are made up


def listed(name: str, ordinal: int | None) -> Any:
    """A device of a plugin, as ONNX Runtime lists it."""
    memory = SimpleNamespace(device_id=ordinal) if ordinal is not None else None
    return SimpleNamespace(ep_name=name, memory_info=lambda kind: memory, ep_metadata={"library_path": "/p.so"})


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    devices = [listed("cuda_ep", 1)]
    monkeypatch.setattr(other_plugins, "list_other_cuda_plugins", lambda: tuple(devices))
    return devices


CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("bound", "name"),
    [
        (("cuda_ep", CPU), "cuda_ep"),
        (("cuda_ep", CUDA, CPU), "cuda_ep"),
        ((CUDA, "cuda_ep", CPU), None),
        ((CPU, "cuda_ep"), None),
        ((CUDA, CPU), None),
        (("cuda_ep", "OpenVINOExecutionProvider", CPU), None),
        ((), None),
    ],
)
def test_the_plugin_that_a_session_is_bound_to_first(bound: tuple[str, ...], name: str | None) -> None:
    assert other_plugins.bound_plugin(bound) == name


@pytest.mark.parametrize(
    ("options", "memory", "ordinal"),
    [({"device_id": "2"}, 1, 2), ({"device_id": "0"}, 1, 0), ({}, 1, 1), ({"device_id": "x"}, 1, 1), ({}, None, 0)],
)
@pytest.mark.parametrize("context", [True, False, None])
def test_a_session_of_a_plugin_has_a_context_on_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
    plugins: list[Any],
    options: dict[str, str],
    memory: int | None,
    ordinal: int,
    context: bool | None,
) -> None:
    """The driver is asked about the GPU of the session. Where it does not know, nothing is refused."""
    asked: list[int] = []

    def is_active(gpu: int) -> bool | None:
        asked.append(gpu)
        return context

    plugins[0] = listed("cuda_ep", memory)
    monkeypatch.setattr(other_plugins, "context_is_active", is_active)
    session = InferenceSession.__new__(InferenceSession)
    session._provider_options = {"cuda_ep": options}
    state = CudaState(0, (), 1)
    if context is False:
        with pytest.raises(ProviderFallbackError, match=f"no CUDA context on cuda:{ordinal}"):
            other_plugins.verified_ordinal(session, "cuda_ep", state)
    else:
        assert other_plugins.verified_ordinal(session, "cuda_ep", state) == ordinal
    assert asked == [ordinal]
    assert other_plugins.verified_ordinal(session, "cuda_ep", CudaState(0, None, 1)) == ordinal
