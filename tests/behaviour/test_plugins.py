"""CUDA as a plugin: ONNX Runtime's CPU package, and the real provider's file in a package or a folder of its own.

The sessions are over the lab's CUDA libraries, which compute nothing; tests/gpu/test_plugins.py has a GPU.
"""

from __future__ import annotations

import json
import shutil
import signal
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx.parser
import pytest

from tests.lab import installed
from tests.lab.child import Machine
from tests.lab.fixtures import PLUGIN, Lab, provider_library

pytestmark = pytest.mark.lab

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
BOUND = [CUDA, CPU]

#: What a program does that brings a plugin: load what it links, register it.
REGISTER = """
import glob, os, sys, warnings
import ortgpu
ortgpu.preload()
import onnxruntime
LIBRARY = glob.glob(os.path.join(os.path.dirname(os.path.dirname(onnxruntime.__file__)), FOLDER, "*providers_cuda*"))[0]
def preload():
    from ortgpu.environment.libraries.search import places_for, resolve
    from ortgpu.environment.libraries.wheel import read_provider
    from ortgpu.provider.preloading import Plan, load
    provider = read_provider(LIBRARY)
    load(Plan(provider, resolve(places_for(provider, None, None), provider.needed, provider.cuda_major)))
preload()
onnxruntime.register_execution_provider_library(NAME, LIBRARY)
def devices():
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == "CUDAExecutionProvider"]
"""

#: Reports the error, with all that it says.
ATTEMPT = """
def attempt(make):
    try:
        session = make()
    except Exception as error:
        report({"error": type(error).__name__, "text": str(error), "fixes": list(getattr(error, "fixes", ()))})
    else:
        report({"providers": session.get_providers(), "device": str(session.device)})
"""


@pytest.fixture(scope="module")
def packaged(module_lab: Lab) -> Machine:
    return module_lab.machine_with_plugin(gpus=2)


@pytest.fixture(scope="module")
def loose(module_lab: Lab) -> Machine:
    return module_lab.machine_with_plugin(packaged=False, gpus=2)


def seen(machine: Machine, code: str, *, env: Mapping[str, str] | None = None) -> Any:
    """What the code reports: it must end well, print nothing and leave no line of ONNX Runtime's log."""
    child = machine.run(ATTEMPT + textwrap.dedent(code), env=env)
    assert child.returncode == 0, child.output
    assert child.stdout == "", "a library does not print"
    return child.json


def registering(code: str, name: str = CUDA, folder: str = "plugin") -> str:
    return f"NAME, FOLDER = {name!r}, {folder!r}" + REGISTER + textwrap.dedent(code)


# Each way of arrival


def test_a_package_is_found_loaded_and_registered(packaged: Machine, module_lab: Lab) -> None:
    outcome = packaged.open_session(module_lab.models.relu)
    assert outcome.error is None, outcome.error.text
    assert outcome.providers == (CUDA, CPU)
    assert outcome.warnings == ()
    assert outcome.result.stderr == ""


@pytest.mark.parametrize("device", ["cuda:1", 1, "GPU-00000000-0000-0000-0000-000000000001"])
def test_each_gpu_by_its_name(packaged: Machine, module_lab: Lab, device: object) -> None:
    outcome = packaged.open_session(module_lab.models.relu, device=device)
    assert outcome.error is None, outcome.error.text
    assert str(outcome.device).startswith("cuda:1")


@pytest.mark.parametrize("name", [CUDA, "mine"])
def test_a_plugin_of_the_program_is_used_as_it_is(loose: Machine, module_lab: Lab, name: str) -> None:
    model = str(module_lab.models.relu)
    found = seen(loose, registering(f"attempt(lambda: ortgpu.GPUSession({model!r}, device=1))", name))
    assert found["providers"] == BOUND, found
    assert found["device"].startswith("cuda:1")


def test_without_its_program_a_loose_file_is_no_cuda(loose: Machine, module_lab: Lab) -> None:
    outcome = loose.open_session(module_lab.models.relu)
    assert outcome.error is not None
    assert outcome.error.type == "CPUOnlyPackageError"
    assert "onnxruntime-ep" not in outcome.error.text, "the index has no such package"
    assert "as a plugin for ONNX Runtime" in outcome.error.fixes[-1]


def test_the_doctor_says_which_way_cuda_came(packaged: Machine) -> None:
    child = packaged.run(argv=["-m", "ortgpu", "doctor", "--json"])
    environment = json.loads(child.stdout)["environment"]
    arrival = environment["packages"]["onnxruntime"]["arrival"]
    assert arrival["way"] == "plugin package"
    assert arrival["package"]["name"] == f"onnxruntime-ep-cuda{installed.CUDA}"
    shown = packaged.run(argv=["-m", "ortgpu", "doctor"], env={"COLUMNS": "400"}).stdout
    assert f"CUDA comes from a plugin package: onnxruntime-ep-cuda{installed.CUDA}" in shown


# SessionOptions that carry devices


BY_DEVICE = """
options = onnxruntime.SessionOptions()
options.add_provider_for_devices([devices()[{number}]], {{}})
"""


def test_a_session_by_device_is_verified(loose: Machine, module_lab: Lab) -> None:
    model = str(module_lab.models.relu)
    code = registering(BY_DEVICE.format(number=1) + f"attempt(lambda: ortgpu.GPUSession({model!r}, options))")
    found = seen(loose, code)
    assert found["providers"] == BOUND, found
    assert found["device"].startswith("cuda:1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("device=0", "different GPUs"),
        ("cuda_graph=True", "cuda_graph=True would change them"),
        ("providers=['CUDAExecutionProvider']", "providers= would change them"),
    ],
)
def test_what_contradicts_carried_devices(loose: Machine, module_lab: Lab, arguments: str, says: str) -> None:
    model = str(module_lab.models.relu)
    make = f"attempt(lambda: ortgpu.GPUSession({model!r}, options, {arguments}))"
    found = seen(loose, registering(BY_DEVICE.format(number=1) + make))
    assert found.get("error") == "ProviderRequestError", found
    assert says in found["text"]


def test_carried_options_that_end_on_the_cpu_are_refused(loose: Machine, module_lab: Lab) -> None:
    model = str(module_lab.models.relu)
    policy = """
    options = onnxruntime.SessionOptions()
    options.set_provider_selection_policy(onnxruntime.OrtExecutionProviderDevicePolicy.PREFER_CPU)
    """
    make = f"attempt(lambda: ortgpu.GPUSession({model!r}, options))"
    found = seen(loose, registering(textwrap.dedent(policy) + make))
    assert found.get("error") == "ProviderRequestError", found
    assert "leave this session on the CPU" in found["text"]


def test_a_session_with_carried_devices_is_not_pickled(loose: Machine, module_lab: Lab) -> None:
    model = str(module_lab.models.relu)
    make = f"""
    import pickle
    session = ortgpu.GPUSession({model!r}, options)
    try:
        pickle.dumps(session)
    except TypeError as error:
        report(str(error))
    """
    said = seen(loose, registering(BY_DEVICE.format(number=0) + textwrap.dedent(make)))
    assert "carry execution providers" in said


# The guard


def test_the_guard_lets_pass_what_works(loose: Machine, module_lab: Lab) -> None:
    model = str(module_lab.models.relu)
    code = f"""
    found = []
    with ortgpu.enforce():
        session = onnxruntime.InferenceSession({model!r}, providers=["CUDAExecutionProvider"])
        found.append((type(session).__mro__[1].__name__, session.get_providers(), str(session.device)))
        options = onnxruntime.SessionOptions()
        options.add_provider_for_devices(devices()[:1], {{}})
        found.append(onnxruntime.InferenceSession({model!r}, options).get_providers())
    report(found)
    """
    (kind, bound, device), carried = seen(loose, registering(code))
    assert (kind, bound, carried) == ("GuardedSession", BOUND, BOUND)
    assert device.startswith("cuda:0")


def test_the_guard_registers_nothing(packaged: Machine, module_lab: Lab) -> None:
    model = str(module_lab.models.relu)
    make = f"onnxruntime.InferenceSession({model!r}, providers=['CUDAExecutionProvider'])"
    found = seen(packaged, f"import onnxruntime, ortgpu\nwith ortgpu.enforce():\n    attempt(lambda: {make})")
    assert found.get("error") == "CPUOnlyPackageError", found
    assert "has not registered it" in found["text"]
    fix = found["fixes"][0]
    mended = seen(packaged, f"{fix}\nwith ortgpu.enforce():\n    attempt(lambda: {make})")
    assert mended.get("providers") == BOUND, mended


@pytest.mark.parametrize(
    ("registers", "again"),
    [
        (False, "ortgpu.GPUSession(MODEL)"),  # which registers the plugin itself
        (True, "onnxruntime.InferenceSession(MODEL, providers=['CUDAExecutionProvider'])"),
    ],
)
def test_what_the_guard_lacked_keeps_no_later_session_on_the_cpu(
    packaged: Machine, module_lab: Lab, registers: bool, again: str
) -> None:
    """An earlier error is remembered where the CPU is allowed."""
    code = f"""
    import warnings
    import onnxruntime, ortgpu
    from ortgpu.provider.runtime import load_runtime
    MODEL = {str(module_lab.models.relu)!r}
    ortgpu.install()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        onnxruntime.InferenceSession(MODEL, providers=["CUDAExecutionProvider"])
    error = warned[0].message.error
    assert error.code == "cpu-only-package", error
    if {registers}:
        onnxruntime.register_execution_provider_library({CUDA!r}, load_runtime().provider_library)
    attempt(lambda: {again})
    """
    found = seen(packaged, code, env={"ORTGPU_ALLOW_CPU": "1"})
    assert found.get("providers") == BOUND, found


# Faults


def test_a_plugin_of_another_release_is_refused_before_it_is_registered(module_lab: Lab) -> None:
    """ONNX Runtime 1.32.0 dies of SIGSEGV with the provider of 1.31.1."""
    machine = module_lab.machine_with_plugin()
    machine.overlay.uninstall("onnxruntime").add_wheel(module_lab.wheels.get("onnxruntime", "1.32.0"))
    outcome = machine.open_session(module_lab.models.relu)
    assert outcome.error is not None, outcome.result.output
    assert outcome.error.type == "LibraryVersionError", outcome.error.text
    assert f"belongs to ONNX Runtime {installed.VERSION}" in outcome.error.text
    assert outcome.error.fixes[0].endswith(f"onnxruntime=={installed.VERSION}")
    machine.overlay.uninstall("onnxruntime").add_wheel(module_lab.wheels.cpu_twin)
    assert machine.open_session(module_lab.models.relu).providers == (CUDA, CPU)


def test_a_package_without_its_library(module_lab: Lab) -> None:
    machine = module_lab.machine_with_plugin()
    machine.overlay.remove(f"{PLUGIN}/*providers_cuda*")
    outcome = machine.open_session(module_lab.models.relu)
    assert outcome.error is not None
    assert outcome.error.type == "BrokenPackageError", outcome.error.text
    assert PLUGIN.replace("_", "-") in outcome.error.text


def test_a_plugin_that_lists_no_device(packaged: Machine, module_lab: Lab, tmp_path: Path) -> None:
    machine = packaged.but(env={**packaged.env, "STUB_PCI_DEVICES": str(tmp_path)})
    outcome = machine.open_session(module_lab.models.relu)
    assert outcome.error is not None
    assert outcome.error.type == "NoDeviceError", outcome.error.text
    assert "/sys/bus/pci/devices" in outcome.error.text
    assert "onnxruntime-gpu" in outcome.error.fixes[0]


def test_the_guard_knows_a_registered_plugin_that_lists_no_device(
    packaged: Machine, module_lab: Lab, tmp_path: Path
) -> None:
    """It registers nothing, so it cannot ask ONNX Runtime whether that was done."""
    model = str(module_lab.models.relu)
    code = f"""
    with ortgpu.enforce():
        attempt(lambda: onnxruntime.InferenceSession({model!r}, providers=["CUDAExecutionProvider"]))
    """
    found = seen(packaged, registering(code, folder=PLUGIN), env={"STUB_PCI_DEVICES": str(tmp_path)})
    assert found["error"] == "NoDeviceError", found


def test_a_provider_that_the_program_only_holds_is_not_registered(loose: Machine, module_lab: Lab) -> None:
    """It may be that of another ONNX Runtime in this process, which would end it."""
    code = f"""
    import mmap, ortgpu, onnxruntime
    with open({str(loose.overlay.path("plugin/*providers_cuda*"))!r}, "rb") as file:
        held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    attempt(lambda: ortgpu.GPUSession({str(module_lab.models.relu)!r}))
    assert [device.ep_name for device in onnxruntime.get_ep_devices()] == [{CPU!r}]
    """
    found = seen(loose, code)
    assert found.get("error") == "NoDeviceError", found
    assert "onnxruntime-gpu" in found["fixes"][0]


def test_a_package_that_is_installed_in_place(module_lab: Lab, tmp_path: Path) -> None:
    """pip install -e leaves the metadata, and a line with the folder of the module."""
    machine = module_lab.machine_with_plugin()
    (machine.overlay.site / PLUGIN).rename(tmp_path / PLUGIN)
    machine.overlay.replace("__editable__.pth", f"{tmp_path}\n".encode())
    outcome = machine.open_session(module_lab.models.relu)
    assert outcome.error is None, outcome.error.text
    assert outcome.providers == (CUDA, CPU)


def test_a_plugin_that_would_call_into_another_onnx_runtime(packaged: Machine, module_lab: Lab, tmp_path: Path) -> None:
    """As beside a program's own ONNX Runtime. Plain ONNX Runtime dies of SIGSEGV."""
    other = str(shutil.copy(packaged.overlay.path("onnxruntime/capi/libonnxruntime_providers_shared.so"), tmp_path))
    model = str(module_lab.models.relu)
    code = f"""
    import ctypes, ortgpu
    ctypes.CDLL({other!r}, ctypes.RTLD_GLOBAL)
    attempt(lambda: ortgpu.GPUSession({model!r}))
    """
    found = seen(packaged, code)
    assert found.get("error") == "RuntimeConflictError", found
    assert f"Provider_GetHost is taken from {other}" in found["text"]


def test_a_damaged_library_of_a_package_is_blamed_on_that_package(module_lab: Lab) -> None:
    machine = module_lab.machine_with_plugin()
    machine.overlay.replace(f"{PLUGIN}/{provider_library().name}", b"no library")
    error = machine.open_session(module_lab.models.relu).error
    assert error is not None
    assert (error.type, error.details["package"]) == ("BrokenPackageError", PLUGIN.replace("_", "-")), error.text
    assert error.fixes == (f"install {PLUGIN.replace('_', '-')} again, from where it came",)


@pytest.mark.parametrize("name", [CUDA, "mine"])
def test_a_plugin_of_the_program_that_lists_no_device(
    loose: Machine, module_lab: Lab, tmp_path: Path, name: str
) -> None:
    """ONNX Runtime lists what is registered by its devices only: the file that the process has opened tells."""
    machine = loose.but(env={**loose.env, "STUB_PCI_DEVICES": str(tmp_path)})
    model = str(module_lab.models.relu)
    code = f"""
    try: ortgpu.GPUSession({model!r})
    except ortgpu.NoDeviceError: pass
    ortgpu.install()
    attempt(lambda: onnxruntime.InferenceSession({model!r}, providers=[{CUDA!r}]))
    """
    found = seen(machine, registering(code, name))
    assert found.get("error") == "NoDeviceError", found


def test_libraries_that_the_plugin_links_are_missing(module_lab: Lab) -> None:
    machine = module_lab.machine_with_plugin()
    machine.overlay.remove("nvidia/*/lib/libcublasLt*")
    outcome = machine.open_session(module_lab.models.relu)
    assert outcome.error is not None
    assert outcome.error.type == "LibraryNotFoundError", outcome.error.text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("device=7", "DeviceNotFoundError"),
        ("providers=[('CUDAExecutionProvider', {'devise_id': '0'})]", "ProviderOptionError"),
        ("providers=[('CUDAExecutionProvider', {'arena_extend_strategy': 'kNever'})]", "ProviderOptionError"),
    ],
)
def test_what_would_end_the_process_is_refused_before(
    packaged: Machine, module_lab: Lab, arguments: str, error: str
) -> None:
    model = str(module_lab.models.relu)
    code = f"""
    import ortgpu
    attempt(lambda: ortgpu.GPUSession({model!r}, {arguments}))
    ortgpu.GPUSession({model!r})
    """
    assert seen(packaged, code)["error"] == error


@pytest.mark.parametrize(
    ("code", "error"),
    [(2, "InsufficientDeviceMemoryError"), (46, "DeviceBusyError"), (304, "DriverUnusableError")],
)
def test_a_context_that_cannot_be_made_is_refused_before(
    packaged: Machine, module_lab: Lab, code: int, error: str
) -> None:
    """The plugin would make it, and end the process."""
    outcome = packaged.but(env={**packaged.env, "STUB_CUDA_NO_CONTEXT": str(code)}).open_session(module_lab.models.relu)
    assert outcome.error is not None
    assert outcome.error.type == error, outcome.error.text


def test_a_gpu_that_is_full_for_a_moment_is_tried_again(packaged: Machine, module_lab: Lab) -> None:
    """Also where the CPU is allowed: it is not that this process has no GPU."""
    code = f"""
    import os, warnings
    import ortgpu
    os.environ["STUB_CUDA_NO_CONTEXT"] = "2"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ortgpu.GPUSession({str(module_lab.models.relu)!r})
    assert [each.message.error.code for each in warned] == ["insufficient-device-memory"], warned
    del os.environ["STUB_CUDA_NO_CONTEXT"]
    attempt(lambda: ortgpu.GPUSession({str(module_lab.models.relu)!r}))
    """
    found = seen(packaged, code, env={"ORTGPU_ALLOW_CPU": "1"})
    assert found.get("providers") == BOUND, found


#: Operators whose kernels end the process when the session is made, or at its first run, and others beside them.
DEADLY = {
    "If": "(float[4] x, bool c) => (float[4] y) { y = If(c) <then_branch = t () => (float[4] a) { a = Relu(x) }, "
    "else_branch = e () => (float[4] b) { b = Neg(x) }> }",
    "Scan": "(float[4] x, float[3,4] v) => (float[4] y) { y = Scan <num_scan_inputs = 1, "
    "body = b (float[4] a, float[4] s) => (float[4] d) { d = Add(a, s) }>(x, v) }",
    "Slice": "(float[4] x) => (float[2] y) <int64[1] s = {0}, int64[1] e = {2}> { y = Slice(x, s, e) }",
    "Size": "(float[4] x) => (int64 y) { y = Size(x) }",
    "Tile": "(float[2,2] x) => (float[4,4] y) <int64[2] n = {2,2}> { y = Tile(x, n) }",
    "OneHot": "(int64[4] x) => (float[4,8] y) <int64 d = {8}, float[2] v = {0,1}> { y = OneHot(x, d, v) }",
    "GatherElements": "(float[4,4] x, int64[4,4] i) => (float[4,4] y) { y = GatherElements(x, i) }",
    "ScatterElements": "(float[4] x, int64[4] i) => (float[4] y) { y = ScatterElements(x, i, x) }",
    "Resize": "(float[1,1,4,4] x, int64[4] s) => (float[a,b,c,d] y) { y = Resize(x, , , s) }",
    "FastGelu": "(float[4,4] x, float[4] b) => (float[4,4] y) { y = com.microsoft.FastGelu(x, b) }",
    "Attention": "(float[1,4,8] x, float[8,24] w, float[24] b) => (float[1,4,8] y)"
    " { y = com.microsoft.Attention <num_heads = 2>(x, w, b) }",
    "EmbedLayerNormalization": "(int32[1,4] i, float[8,8] w, float[8] g) => (float[1,4,8] y, int32[1] m)"
    " { y, m = com.microsoft.EmbedLayerNormalization(i, , w, w, , g, g) }",
}
HARMLESS = {
    "a condition that is constant": "(float[4] x) => (float[4] y) <bool c = {1}> { y = If(c) <then_branch = t () => "
    "(float[4] a) { a = Relu(x) }, else_branch = e () => (float[4] b) { b = Neg(x) }> }",
    "scales": "(float[1,1,4,4] x) => (float[1,1,8,8] y) <float[4] s = {1,1,2,2}> { y = Resize(x, , s) }",
    "Concat": "(float[4] x) => (float[8] y) { y = Concat <axis = 0>(x, x) }",
    "Split": "(float[4] x) => (float[2] y, float[2] z) { y, z = Split(x) }",
    "Pad": "(float[4] x, int64[2] p) => (float[n] y) { y = Pad(x, p) }",
    "CumSum": "(float[4] x) => (float[4] y) <int64 a = {0}> { y = CumSum(x, a) }",
    "ScatterND": "(float[4] x, int64[2,1] i, float[2] u) => (float[4] y) { y = ScatterND(x, i, u) }",
    "BiasGelu": "(float[4,4] x, float[4] b) => (float[4,4] y) { y = com.microsoft.BiasGelu(x, b) }",
}

#: Runs the model with zeros.
RUN = """
import numpy
def run(session):
    kinds = {"float": "float32"}
    types = {each.name: each.type[7:-1] for each in session.get_inputs()}
    session.run(None, {each.name: numpy.zeros(each.shape, kinds.get(types[each.name], types[each.name]))
                       for each in session.get_inputs()})
"""


def made(folder: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The paths of models, each written to a file of its own."""
    sets = 'opset_import: ["" : 17, "com.microsoft" : 1]'
    for name, text in texts.items():
        model = onnx.parser.parse_model(f"<ir_version: 8, {sets}> g {text}")
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    return {name: str(folder / f"{name}.onnx") for name in texts}


@pytest.fixture(scope="module")
def deadly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return made(tmp_path_factory.mktemp("deadly"), DEADLY)


def test_operators_that_end_the_process_are_refused(packaged: Machine, deadly: dict[str, str]) -> None:
    code = f"""
    import ortgpu
    found = {{}}
    for name, model in {deadly!r}.items():
        try:
            ortgpu.GPUSession(model)
        except ortgpu.PlacementError as error:
            found[name] = str(error)
    report(found)
    """
    found = seen(packaged, code)
    assert {name for name, text in found.items() if f"cannot compute {name} here" in text} == set(DEADLY), found


@pytest.mark.parametrize("name", DEADLY)
def test_plain_onnxruntime_dies_of_it(packaged: Machine, deadly: dict[str, str], name: str) -> None:
    """Of the provider of 1.31.1."""
    plain = f"{RUN}\nrun(onnxruntime.InferenceSession({deadly[name]!r}, providers=['CUDAExecutionProvider']))"
    child = packaged.run(registering(plain, folder=PLUGIN))
    assert child.returncode in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS), child.output


@pytest.mark.parametrize("name", ["If", "Tile"])
def test_where_the_cpu_is_allowed_it_computes_such_an_operator(
    packaged: Machine, deadly: dict[str, str], name: str
) -> None:
    """Refused before a session opens, and after."""
    model = deadly[name]
    code = f"{RUN}\nimport ortgpu\nsession = ortgpu.GPUSession({model!r}, allow_cpu=True)\nrun(session)"
    child = packaged.run(f"{code}\nreport(session.get_providers())")
    assert child.json == [CPU], child.output
    strict = packaged.open_session(Path(model), allow_cpu=True, cpu_nodes="forbid")
    assert strict.error is not None
    assert strict.error.type == "PlacementError"


def test_operators_that_call_nothing_back_are_not_refused(packaged: Machine, tmp_path: Path) -> None:
    models = made(tmp_path, HARMLESS)
    code = f"{RUN}\nimport ortgpu\nfor name, model in {models!r}.items(): run(ortgpu.GPUSession(model)); report(name)"
    child = packaged.run(code)
    assert child.returncode == 0, f"{child.json} was the last that ran\n{child.output}"
    assert child.json == [*HARMLESS][-1]


def test_a_registered_plugin_does_not_survive_a_fork(packaged: Machine, module_lab: Lab) -> None:
    model = str(module_lab.models.relu)
    code = f"""
    import os, signal, ortgpu
    import onnxruntime
    ortgpu.GPUSession({model!r})
    def forked(make):
        child = os.fork()
        if not child:
            attempt(make)
            os._exit(0)
        return os.waitpid(child, 0)[1]
    def plain():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for the last words of std::terminate
        return onnxruntime.InferenceSession({model!r}, providers=["CUDAExecutionProvider"])
    assert forked(plain) == signal.SIGABRT
    assert forked(lambda: ortgpu.GPUSession({model!r})) == 0
    """
    found = seen(packaged, code)
    assert found["error"] == "ForkedSessionError", found


# Other processes, and what sessions say

LOOSE = "plugin registered by the program"

#: What a process does that did not register the plugin. Its class says itself what is pickled.
WORKER = """
import os
import ortgpu

def seen(session):
    return [session.get_providers(), str(session.device)[:6], str(ortgpu.sessions()[-1].arrival)]

def session_of_ray(model):
    from ortgpu.integrations.ray.session import AssignedSession
    return AssignedSession(model)

class Own(ortgpu.GPUSession):
    def __getstate__(self):
        return self._model_path
    def __setstate__(self, path):
        self.__init__(path, device=1)
"""


#: What a session asks Ray: the GPUs of this worker.
RAY = """
import os

class get_runtime_context:
    def get_accelerator_ids(self):
        return {"GPU": os.environ["CUDA_VISIBLE_DEVICES"].split(",")}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the module "worker"."""
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


def pickled(machine: Machine, session: str, folder: Path) -> Path:
    """A file with the pickle of a session, made by a program that has registered the plugin."""
    code = f"import pickle, worker\nopen('pickle', 'wb').write(pickle.dumps({session}))\nsession = None"
    child = machine.run(registering(code), cwd=folder)
    assert child.returncode == 0, child.output
    return folder / "pickle"


def unpickled(machine: Machine, folder: Path) -> Any:
    """What ``WORKER`` sees of the session in a process that has registered nothing, or the error."""
    code = """
    import pickle, worker
    try:
        report(worker.seen(pickle.load(open("pickle", "rb"))))
    except worker.ortgpu.GPUError as error:
        report([type(error).__name__, str(error)])
    """
    child = machine.run(textwrap.dedent(code), cwd=folder)
    assert (child.returncode, child.stdout, child.stderr) == (0, "", ""), child.output
    return child.json


def test_a_spawned_worker_registers_what_the_program_had(loose: Machine, module_lab: Lab, folder: Path) -> None:
    code = f"""
    import multiprocessing, worker
    from concurrent.futures import ProcessPoolExecutor
    session = ortgpu.GPUSession({str(module_lab.models.relu)!r}, device=1)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        report([worker.seen(session), *pool.map(worker.seen, [session, session])])
    """
    child = loose.run(registering(code), cwd=folder)
    assert child.returncode == 0, child.output
    assert child.json == [[BOUND, "cuda:1", LOOSE]] * 3


@pytest.mark.parametrize("kind", ["ortgpu.GPUSession({!r}, device=1)", "worker.Own({!r}, device=1)"])
def test_a_fresh_process_registers_what_the_program_had(
    loose: Machine, module_lab: Lab, folder: Path, kind: str
) -> None:
    pickled(loose, kind.format(str(module_lab.models.relu)), folder)
    assert unpickled(loose, folder) == [BOUND, "cuda:1", LOOSE]


def test_a_guarded_session_is_verified_where_it_arrives(loose: Machine, module_lab: Lab, folder: Path) -> None:
    model = str(module_lab.models.relu)
    code = f"""
    import pickle
    with ortgpu.enforce():
        session = onnxruntime.InferenceSession({model!r}, providers=["CUDAExecutionProvider"])
    open("pickle", "wb").write(pickle.dumps(session))
    """
    child = loose.run(registering(code), cwd=folder)
    assert child.returncode == 0, child.output
    assert unpickled(loose, folder) == [BOUND, "cuda:0", LOOSE]


def test_a_session_of_ray_brings_it_to_another_worker(loose: Machine, module_lab: Lab, folder: Path) -> None:
    (folder / "ray.py").write_text(RAY)
    machine = loose.but(env={**loose.env, "CUDA_VISIBLE_DEVICES": "0"})
    pickled(machine, f"worker.session_of_ray({str(module_lab.models.relu)!r})", folder)
    assert unpickled(machine, folder) == [BOUND, "cuda:0", LOOSE]


def test_where_cuda_arrives_in_another_way_that_is_taken(
    loose: Machine, packaged: Machine, module_lab: Lab, folder: Path
) -> None:
    pickled(loose, f"ortgpu.GPUSession({str(module_lab.models.relu)!r}, device=1)", folder)
    providers, device, arrival = unpickled(packaged, folder)
    assert (providers, device) == (BOUND, "cuda:1")
    assert arrival.startswith("plugin package: onnxruntime-ep-cuda")


def test_a_plugin_that_is_not_where_the_pickle_arrives(loose: Machine, module_lab: Lab, folder: Path) -> None:
    path = pickled(loose, f"ortgpu.GPUSession({str(module_lab.models.relu)!r})", folder)
    whole = path.read_bytes()
    assert b"/plugin/lib" in whole
    path.write_bytes(whole.replace(b"/plugin/lib", b"/removed/li"))
    kind, text = unpickled(loose, folder)
    assert kind == "CPUOnlyPackageError"
    assert "register its library first" in text


def test_a_package_needs_nothing_passed(packaged: Machine, module_lab: Lab, folder: Path) -> None:
    make = f"ortgpu.GPUSession({str(module_lab.models.relu)!r}, device=1)"
    code = f"import ortgpu, pickle\nopen('pickle', 'wb').write(pickle.dumps({make}))"
    assert packaged.run(code, cwd=folder).returncode == 0
    assert b"providers_cuda" not in (folder / "pickle").read_bytes()
    assert unpickled(packaged, folder)[:2] == [BOUND, "cuda:1"]


def test_the_doctor_s_child_registers_what_the_program_had(loose: Machine, module_lab: Lab) -> None:
    code = f"""
    found = ortgpu.diagnose({str(module_lab.models.relu)!r}, probe=True)
    steps = {{step.name: step.ok for step in found.probe.steps}}
    bound = [found.probe.step(name).data["providers"] for name in ("session", "model")]
    report([steps, bound, found.as_dict()["environment"]["packages"]["onnxruntime"]["arrival"]["way"],
            [name for name in os.environ if "PLUGIN" in name]])
    """
    steps, bound, way, variables = seen(loose, registering(code))
    computes_nothing = {"session"}
    assert {name for name, ok in steps.items() if not ok} == computes_nothing
    assert bound == [BOUND, BOUND]
    assert (way, variables) == ("registered by the program", [])


def test_placement_is_explained_by_a_child_with_the_plugin(loose: Machine, module_lab: Lab) -> None:
    make = f"ortgpu.GPUSession({str(module_lab.models.relu)!r}, device=1)"
    assert seen(loose, registering(f"report(str({make}.explain_placement()))")).startswith("1 node, 1 on the GPU")


def test_a_preflight_s_child_knows_the_cuda_of_the_plugin(lab: Lab) -> None:
    """The program has the CUDA runtime that the plugin is for; the child has the one for NCCL."""
    machine = lab.machine_with_plugin(packaged=False)
    runtime = machine.overlay.path(f"nvidia/*/lib/{installed.soname('libcudart')}")
    machine.overlay.replace(f"toolkit/{runtime.name}", runtime.read_bytes())
    machine = lab.with_nccl(machine)
    call = 'ortgpu.distributed.preflight(calls=[ortgpu.distributed.Collective("all_reduce", "float32", 7)])'
    of_toolkit = str(machine.overlay.site / "toolkit" / runtime.name)
    made = machine.run(
        f"import ctypes\nctypes.CDLL({of_toolkit!r})\n" + registering(f"report({call}.ranks[0].onnxruntime)")
    )
    assert made.returncode == 0, made.output
    assert made.json == f"onnxruntime {installed.VERSION} (CUDA from a {LOOSE})"


def test_sessions_say_which_way_cuda_came(packaged: Machine, loose: Machine, module_lab: Lab) -> None:
    model = str(module_lab.models.relu)
    code = f"""
    import dataclasses, json, onnxruntime, ortgpu
    kept = [ortgpu.GPUSession({model!r}, device=1)]
    kept += [onnxruntime.InferenceSession({model!r}, providers=[name]) for name in ({CPU!r}, {CUDA!r})]
    report([[each.kind, each.arrival and each.arrival.way, str(each), json.loads(json.dumps(dataclasses.asdict(each)))]
            for each in ortgpu.sessions()])
    """
    for machine, told, way in (
        (packaged, textwrap.dedent(code), "plugin package"),
        (loose, registering(code), LOOSE[7:]),
    ):
        ours, on_cpu, plain = seen(machine, told)
        assert [each[:2] for each in (ours, plain)] == [["GPUSession", way], ["unguarded", way]]
        assert ours[2].partition("], ")[2].startswith(f"CUDA from a {'' if machine is packaged else 'plugin '}{way}")
        assert Path(ours[3]["arrival"]["library"]).is_file()
        assert on_cpu[1] is None
        assert "CUDA" not in on_cpu[2]


def test_the_program_that_registers_a_package_s_library_has_the_package(packaged: Machine, module_lab: Lab) -> None:
    code = f"""
    ortgpu.GPUSession({str(module_lab.models.relu)!r})
    report(str(ortgpu.inspect_environment().packages.onnxruntime.arrival))
    """
    for program in (registering(code, folder=PLUGIN), "import ortgpu\n" + textwrap.dedent(code)):
        assert seen(packaged, program).startswith("plugin package: onnxruntime-ep-cuda")


def test_a_plugin_that_the_program_registers_later_is_noticed(module_lab: Lab) -> None:
    """Also before a session of this library opens."""
    machine = module_lab.machine_with_plugin()
    machine.overlay.replace(f"plugin/{provider_library().name}", provider_library())
    code = f"""
    session = onnxruntime.InferenceSession({str(module_lab.models.relu)!r}, providers=[{CUDA!r}])
    report(str(ortgpu.sessions()[0].arrival))
    """
    assert seen(machine, "import ortgpu\nortgpu.GPUSession\n" + registering(code)) == LOOSE


def test_libraries_of_a_folder_serve_a_packaged_plugin(module_lab: Lab) -> None:
    machine = module_lab.machine_with_plugin()
    elsewhere = (machine.overlay.site / f"nvidia/cu{installed.CUDA}/lib").rename(machine.overlay.root / "elsewhere")
    code = f"""
    import ortgpu
    preloaded = ortgpu.preload({str(elsewhere)!r})
    attempt(lambda: ortgpu.GPUSession({str(module_lab.models.relu)!r}))
    assert (preloaded.ok, preloaded.roots) == (True, ({str(elsewhere)!r},)), preloaded
    """
    assert seen(machine, code)["providers"] == BOUND


# Everything that opens sessions, with a packaged plugin

OF_CPU = ("cpu-only", "CPUOnly", "without CUDA", "cannot be used")


def said(machine: Machine, *argv: str, cwd: Path | None = None) -> str:
    child = machine.run(argv=["-m", *argv], env={"COLUMNS": "300"}, cwd=cwd)
    assert child.returncode in (0, 1), child.output
    assert not any(words in child.output for words in OF_CPU), child.output
    return child.stdout


def test_check_opens_the_model(packaged: Machine, module_lab: Lab) -> None:
    text = said(packaged, "ortgpu", "check", "--placement", str(module_lab.models.relu))
    assert "relu.onnx runs on the GPU" in text
    assert "1 node, 1 on the GPU" in text


def test_demo_opens_its_model(packaged: Machine) -> None:
    """Plain ONNX Runtime is on the CPU, since nothing has registered the plugin; the GPUSession is on the GPU."""
    alone, _, ours = said(packaged, "ortgpu", "demo").partition("2. GPUSession")
    assert "the model runs on the CPU" in alone
    assert "cuda:0" in ours


def test_exec_lets_pass_a_program_that_registers_it(packaged: Machine, module_lab: Lab, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import ortgpu; ortgpu.preload(); import onnxruntime, {PLUGIN} as plugin\n"
        "onnxruntime.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())\n"
        f"session = onnxruntime.InferenceSession({str(module_lab.models.relu)!r}, providers=[{CUDA!r}])\n"
        "print(session.get_providers(), session.device)\n"
    )
    text = said(packaged, "ortgpu", "exec", "--", str(packaged.overlay.python), str(program))
    assert text.startswith(f"{BOUND} cuda:0")


def test_the_fixtures_of_pytest_find_its_gpus(packaged: Machine, tmp_path: Path) -> None:
    """A stub computes nothing, which is what they say, and that a session opened: its results are what memory had."""
    (tmp_path / "test_it.py").write_text("def test_it(gpu_session):\n    pass\n")
    text = said(packaged, "pytest", "--ortgpu=require", "-p", "no:cacheprovider", str(tmp_path), cwd=tmp_path)
    assert "ran: [" in text


def test_a_pool_is_on_all_gpus(packaged: Machine, module_lab: Lab) -> None:
    code = f"""
    import ortgpu
    with ortgpu.GPUSessionPool({str(module_lab.models.relu)!r}, devices="all"):
        report([[str(each.device)[:6], str(each.arrival)[:14]] for each in ortgpu.sessions()])
    """
    assert seen(packaged, code) == [["cuda:0", "plugin package"], ["cuda:1", "plugin package"]]
