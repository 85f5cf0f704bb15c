"""Ways by which plugins reach ONNX Runtime, made of real parts: bundled, of several packages, of other providers.

The sessions are over the lab's CUDA libraries, which compute nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ortgpu.environment.libraries.library_file import find_section
from tests.behaviour.test_plugins import BOUND, CPU, CUDA, registering, seen
from tests.lab import installed
from tests.lab.child import Machine
from tests.lab.fixtures import PLUGIN, Lab, add_plugin, provider_library, with_gpus
from tests.lab.stubs import GPU, NVML, Cuda

pytestmark = pytest.mark.lab

WEBGPU, RTX = "WebGpuExecutionProvider", "NvTensorRTRTXExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
WEBGPU_WHEEL = ("onnxruntime-ep-webgpu", "0.4.0")
RTX_WHEEL = ("onnxruntime-ep-nv-tensorrt-rtx-cu13", "0.5.0")

#: Registers a package as its documentation says, and counts what is registered.
OTHERS = """
import importlib, json, os, sys, warnings
import onnxruntime, ortgpu
registered = []
register_library = onnxruntime.register_execution_provider_library
def counting(*arguments):
    registered.append(arguments[0])
    return register_library(*arguments)
onnxruntime.register_execution_provider_library = counting
def register(module):
    plugin = importlib.import_module(module)
    register_library(plugin.get_ep_name(), plugin.get_library_path())
def tried(make):
    try:
        session = make()
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]
    return [type(session).__mro__[1].__name__, session.get_providers()]
"""


def in_guard(requests: list[Any], model: Path, *modules: str) -> str:
    """A program that registers packages, and reports what became of sessions with and without the guard."""
    return (
        OTHERS
        + "".join(f"register({module!r})\n" for module in modules)
        + f"""
warnings.simplefilter("ignore")
def all_of_them():
    return [tried(lambda: onnxruntime.InferenceSession({str(model)!r}, providers=names, enable_fallback=0))
            for names in {requests!r}]
plain = all_of_them()
with ortgpu.enforce():
    guarded = all_of_them()
report([plain, guarded, registered])
"""
    )


# Other providers' plugins, under the guard


@pytest.fixture(scope="module")
def with_webgpu(module_lab: Lab) -> Machine:
    machine = module_lab.machine_with_plugin()
    machine.overlay.add_wheel(module_lab.wheels.get(*WEBGPU_WHEEL))
    return machine


def test_what_names_another_plugin_passes(with_webgpu: Machine, module_lab: Lab) -> None:
    """Release 1.31 does not open WebGPU by its name, without a word, so some of these end on the CPU."""
    requests = [[WEBGPU], [(WEBGPU, {}), CPU], ["AzureExecutionProvider", WEBGPU]]
    plain, guarded, registered = seen(with_webgpu, in_guard(requests, module_lab.models.relu, "onnxruntime_ep_webgpu"))
    assert guarded == plain
    assert registered == []


@pytest.mark.parametrize("names", [[WEBGPU, CUDA, CPU], [CUDA, WEBGPU], None, ["AzureExecutionProvider", CPU, WEBGPU]])
def test_what_asks_for_cuda_too_does_not_end_on_the_cpu(
    with_webgpu: Machine, module_lab: Lab, names: list[str] | None
) -> None:
    code = in_guard([names], module_lab.models.relu, "onnxruntime_ep_webgpu")
    (plain,), (guarded,), registered = seen(with_webgpu, code)
    assert CUDA not in plain[1]
    assert guarded[0] == "CPUOnlyPackageError", guarded
    assert registered == [], "the guard registers nothing"


@pytest.mark.parametrize("names", [[WEBGPU, CUDA, CPU], [CUDA, WEBGPU, CPU], [CUDA, WEBGPU], [CUDA, WEBGPU, "Azure"]])
def test_another_plugin_beside_cuda_is_no_reason_to_refuse(
    with_webgpu: Machine, module_lab: Lab, names: list[str]
) -> None:
    names = [name.replace("Azure", "AzureExecutionProvider") for name in names]
    code = "import ortgpu\nortgpu.preload()\n" + in_guard(
        [names], module_lab.models.relu, "onnxruntime_ep_webgpu", PLUGIN
    )
    (plain,), (guarded,), registered = seen(with_webgpu, code)
    assert CUDA in plain[1]
    assert guarded[0] == "GuardedSession", guarded
    assert guarded[1][0] == CUDA
    assert registered == []


def test_set_providers_follows_the_same_rules(with_webgpu: Machine, module_lab: Lab) -> None:
    code = f"""
register("onnxruntime_ep_webgpu")
found = []
with ortgpu.enforce():
    session = onnxruntime.InferenceSession({str(module_lab.models.relu)!r}, providers=[{CPU!r}])
    for names in ([{WEBGPU!r}, {CUDA!r}], [{WEBGPU!r}]):
        try:
            session.set_providers(names)
        except Exception as error:
            found.append(type(error).__name__)
        found.append(session.get_providers())
report(found)
"""
    assert seen(with_webgpu, OTHERS + code) == ["CPUOnlyPackageError", [CPU], [CPU]]


# TensorRT-RTX, whose real plugin runs until it builds an engine


@pytest.fixture(scope="module")
def with_rtx(module_lab: Lab) -> Machine:
    if installed.CUDA != 13:
        pytest.skip("the plugin of TensorRT-RTX is for CUDA 13")
    machine = module_lab.machine_with_plugin()
    machine.overlay.add_wheel(module_lab.wheels.get(*RTX_WHEEL))
    folder = machine.overlay.site / "onnxruntime_ep_nv_tensorrt_rtx"
    files = [str(path) for path in folder.glob("lib*.so*") if not path.name.startswith("libcudart")]
    plugin = machine.overlay.path(f"{PLUGIN}/*providers_cuda*")
    for name, stub in module_lab.stubs.toolkit(str(plugin), *files).items():
        machine.overlay.replace(f"nvidia/cu13/lib/{name}", stub)
    listed = subprocess.run(["nm", "-D", "--undefined-only", *files], capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r" U ((?:cu[A-Z]|nvml)\w+)$", listed, re.MULTILINE))
    there = [str(module_lab.stubs.cuda), str(module_lab.stubs.nvml)]
    has = subprocess.run(["nm", "-D", "--defined-only", *there], capture_output=True, text=True, check=True).stdout
    lacking = sorted(names - set(re.findall(r" T (\w+)", has)))
    driver = module_lab.stubs.compile(
        "rtx_driver.so", "".join(f"int {name}(void) {{ return 0; }}\n" for name in lacking)
    )
    return of_gpus(machine.but(env={**machine.env, "LD_PRELOAD": f"{module_lab.stubs.hide_from_search}:{driver}"}), 1)


def of_gpus(machine: Machine, count: int) -> Machine:
    """The same machine with so many GPUs of a kind that TensorRT-RTX supports."""
    gpus = tuple(GPU(f"GPU-00000000-0000-0000-0000-{number:012}", capability=(8, 9)) for number in range(count))
    return machine.but(cuda=Cuda(devices=gpus), nvml=NVML(gpus=gpus))


def rtx_first(code: str, *, cuda: bool = True) -> str:
    """A program with the plugin of TensorRT-RTX, which takes no node here: without a GPU it builds no engine."""
    lines = [
        f"RTX, CUDA, TAKES_NOTHING = {RTX!r}, {CUDA!r}, {{'nv_op_types_to_exclude': 'Relu'}}",
        "import ortgpu",
        "ortgpu.preload()",
        OTHERS,
        "register('onnxruntime_ep_nv_tensorrt_rtx')",
        f"register({PLUGIN!r})" if cuda else "",
        code,
    ]
    return "\n".join(lines)


#: ONNX Runtime 1.31 calls a function for the name of TensorRT-RTX that it does not have; 1.32 does without. There the
#: provider of 1.31.1 is refused, so that no session has both by name here.
AS_IN_1_32 = """
from onnxruntime.capi import _pybind_state
_pybind_state.register_nv_tensorrt_rtx_plugins_as_custom_ops = lambda *_: None
"""


def test_tensorrt_rtx_by_device_before_cuda(with_rtx: Machine, module_lab: Lab) -> None:
    code = f"""
options = onnxruntime.SessionOptions()
for name in (RTX, CUDA):
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]
    options.add_provider_for_devices(devices, TAKES_NOTHING if name == RTX else {{}})
session = ortgpu.GPUSession({str(module_lab.models.relu)!r}, options)
report([session.get_providers(), dict(session.placement.by_provider)])
"""
    bound, placed = seen(with_rtx, rtx_first(code))
    assert bound == [RTX, CUDA, CPU]
    assert placed == {CUDA: 1}


def test_a_release_that_does_not_open_tensorrt_rtx_by_name_is_said_to(with_rtx: Machine, module_lab: Lab) -> None:
    code = f"attempt(lambda: ortgpu.GPUSession({str(module_lab.models.relu)!r}, providers=[RTX, CUDA]))"
    found = seen(with_rtx, rtx_first(code))
    assert found.get("error") == "ProviderRequestError", found
    assert "by its device only" in found["text"]
    assert "add_provider_for_devices" in found["fixes"][0]


#: Reports what InferenceSession's constructor is given, and goes no further.
GIVEN = """
def give(self, providers, provider_options, *_):
    report(providers)
    raise NotImplementedError
onnxruntime.InferenceSession._create_inference_session = give
try:
    ortgpu.GPUSession({model!r}, providers={providers})
except NotImplementedError:
    pass
"""


def test_the_options_of_tensorrt_rtx_are_passed_through(with_rtx: Machine, module_lab: Lab) -> None:
    """It gets no device_id, with which ONNX Runtime would not find it."""
    providers = "[(RTX, {'nv_runtime_cache_path': 'cache'}), (CUDA, {'device_id': 0})]"
    code = AS_IN_1_32 + GIVEN.format(model=str(module_lab.models.relu), providers=providers)
    first, second, _ = seen(with_rtx, rtx_first(code))
    assert first == [RTX, {"nv_runtime_cache_path": "cache"}]
    assert second[1]["device_id"] == "0"


def test_an_ordinal_that_tensorrt_rtx_cannot_be_given(with_rtx: Machine, module_lab: Lab) -> None:
    make = f"ortgpu.GPUSession({str(module_lab.models.relu)!r}, providers=[RTX, CUDA], device=1)"
    shown = {"CUDA_VISIBLE_DEVICES": "1,0"}
    found = seen(of_gpus(with_rtx, 2), rtx_first(AS_IN_1_32 + f"attempt(lambda: {make})"), env=shown)
    assert found.get("error") == "ProviderRequestError", found
    assert "takes no device_id, and cuda:1 was asked for" in found["text"]
    own = "CUDA_VISIBLE_DEVICES=GPU-00000000-0000-0000-0000-000000000000"
    assert own in found["fixes"][1], "the number that it has in another CUDA_VISIBLE_DEVICES names another GPU"


@pytest.mark.parametrize("name", [RTX, TENSORRT])
def test_a_tensorrt_that_is_not_registered(with_webgpu: Machine, module_lab: Lab, name: str) -> None:
    code = f"attempt(lambda: ortgpu.GPUSession({str(module_lab.models.relu)!r}, providers=[{name!r}, {CUDA!r}]))"
    found = seen(with_webgpu, "import ortgpu\n" + code)
    assert found.get("error") == "ProviderRequestError", found
    assert f"{name} is not part of the installed ONNX Runtime, and no registered plugin brings it" in found["text"]


def test_the_guard_leaves_out_tensorrt_rtx_where_it_keeps_a_session_from_cuda(
    with_rtx: Machine, module_lab: Lab
) -> None:
    code = f"""
ortgpu.install()
attempt(lambda: onnxruntime.InferenceSession({str(module_lab.models.relu)!r}, providers=[RTX, CUDA]))
"""
    assert seen(with_rtx, rtx_first(code)).get("providers") == BOUND


def test_the_guard_lets_a_session_on_tensorrt_rtx_pass(module_lab: Lab, with_rtx: Machine) -> None:
    """Without CUDA's plugin, in a release that opens it by name: plain ONNX Runtime has these on the GPU."""
    overlay = module_lab.machine_with_plugin(packaged=False).overlay
    overlay.remove("plugin", "nvidia").uninstall("onnxruntime").add_wheel(
        module_lab.wheels.get("onnxruntime", "1.32.0")
    )
    for name in ("onnxruntime_ep_nv_tensorrt_rtx", "nvidia"):
        (overlay.site / name).symlink_to(with_rtx.overlay.site / name)
    code = f"""
warnings.simplefilter("ignore")
import ctypes, glob
ctypes.CDLL(glob.glob(os.path.join(sys.prefix, "lib", "*", "site-packages", "nvidia", "*", "lib", "libcudart.so.*"))[0])
register("onnxruntime_ep_nv_tensorrt_rtx")
ortgpu.install()
takes_nothing = ({RTX!r}, {{"nv_op_types_to_exclude": "Relu"}})
found = []
for names in ([takes_nothing], [takes_nothing, {CUDA!r}], [{CUDA!r}, takes_nothing, {CPU!r}]):
    session = onnxruntime.InferenceSession({str(module_lab.models.relu)!r}, providers=names)
    (record,) = ortgpu.sessions()
    unchanged = type(session) is onnxruntime.InferenceSession
    found.append([session.get_providers(), unchanged, record.kind, record.providers, record.fell_back])
    del session, record
report(found)
"""
    for bound, unchanged, kind, listed, fell_back in seen(with_rtx.but(overlay=overlay), OTHERS + code):
        assert bound == listed == [RTX, CPU]
        assert unchanged
        assert (kind, fell_back) == ("other", False)


# TensorRT, built in


def test_tensorrt_before_cuda_has_its_cache_options(module_lab: Lab) -> None:
    library = provider_library()
    tensorrt = library.with_name(library.name.replace("cuda", "tensorrt"))
    machine = module_lab.machine_that_places(str(library))
    for name, stub in module_lab.stubs.toolkit(str(library), str(tensorrt)).items():
        folder = "cudnn" if name.startswith("libcudnn") else f"cu{installed.CUDA}"
        machine.overlay.replace(f"nvidia/{folder}/lib/{name}", stub)
    options = {"trt_engine_cache_enable": "True", "trt_engine_cache_path": "cache"}
    code = f"import sys\nsys.path.append({str(module_lab.stubs.tensorrt)!r})\nimport onnxruntime, ortgpu\n"
    providers = f"[({TENSORRT!r}, {options!r}), {CUDA!r}]"
    first, second, _ = seen(machine, code + GIVEN.format(model=str(module_lab.models.relu), providers=providers))
    assert first == [TENSORRT, options]
    assert second[0] == CUDA


# A bundled plugin, which ONNX Runtime registers while it is imported


@pytest.fixture(scope="module")
def bundled(module_lab: Lab) -> Machine:
    return module_lab.machine_with_bundled_plugin()


FAILED = "Failed to register bundled CUDA plugin EP"


def test_a_bundled_plugin_has_its_libraries_before_the_import(bundled: Machine, module_lab: Lab) -> None:
    code = f"""
    import warnings
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        import ortgpu
        session = ortgpu.GPUSession({str(module_lab.models.relu)!r}, device=1)
        import onnxruntime
    report([session.get_providers(), str(session.device), onnxruntime.get_available_providers(),
            [str(each.message) for each in warned]])
    """
    bound, device, available, warned = seen(bundled, code)
    assert bound == BOUND
    assert device.startswith("cuda:1")
    assert CUDA in available
    assert warned == []


def test_a_bundled_plugin_that_only_warned_is_registered(bundled: Machine, module_lab: Lab) -> None:
    code = f"""
    import warnings
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        import onnxruntime
    before = onnxruntime.get_available_providers()
    import ortgpu
    session = ortgpu.GPUSession({str(module_lab.models.relu)!r})
    report([[str(each.message) for each in warned], before, session.get_providers()])
    """
    (warned,), before, bound = seen(bundled, code)
    assert warned.startswith(FAILED)
    assert CUDA not in before
    assert bound == BOUND


def test_a_bundled_plugin_under_the_guard(bundled: Machine, module_lab: Lab) -> None:
    make = f"attempt(lambda: onnxruntime.InferenceSession({str(module_lab.models.relu)!r}, providers=[{CUDA!r}]))"
    found = seen(bundled, f"import ortgpu\nortgpu.install()\nimport onnxruntime\n{make}")
    assert found["providers"] == BOUND, found
    guarded = f"with ortgpu.enforce():\n    {make}"
    late = seen(bundled, f"import warnings\nwarnings.simplefilter('ignore')\nimport onnxruntime, ortgpu\n{guarded}")
    assert late.get("error") == "CPUOnlyPackageError", late
    assert "was not registered when it was imported" in late["text"]
    mended = seen(bundled, f"{late['fixes'][0]}\n{guarded}")
    assert mended.get("providers") == BOUND, mended


def test_the_doctor_names_a_bundled_plugin(bundled: Machine) -> None:
    data = json.loads(bundled.run(argv=["-m", "ortgpu", "doctor", "--json"]).stdout)
    assert data["environment"]["packages"]["onnxruntime"]["arrival"]["way"] == "bundled plugin"


@pytest.mark.parametrize("guard", ["", "ortgpu.install()"])
def test_a_bundled_plugin_without_its_libraries(lab: Lab, guard: str) -> None:
    machine = lab.machine_with_bundled_plugin()
    machine.overlay.remove("nvidia/*/lib/libcublasLt*")
    code = f"""
    import warnings
    warnings.simplefilter("ignore")
    import ortgpu
    {guard}
    attempt(lambda: {"__import__('onnxruntime').InferenceSession" if guard else "ortgpu.GPUSession"}(
        {str(lab.models.relu)!r}, providers=[{CUDA!r}]))
    """
    found = seen(machine, code)
    assert found.get("error") == "LibraryNotFoundError", found
    assert "libcublasLt" in found["text"]


@pytest.mark.parametrize("guard", ["", "ortgpu.install()"])
def test_a_registered_plugin_of_another_release_is_refused(lab: Lab, guard: str) -> None:
    """Here ONNX Runtime registers it without a word, and dies of SIGSEGV when a session opens."""
    machine = lab.machine_with_bundled_plugin("1.32.0")
    make = "onnxruntime.InferenceSession" if guard else "ortgpu.GPUSession"
    code = f"import ortgpu\n{guard}\n{'import onnxruntime' if guard else ''}\n"
    found = seen(machine, code + f"attempt(lambda: {make}({str(lab.models.relu)!r}, providers=[{CUDA!r}]))")
    assert found.get("error") == "LibraryVersionError", found
    assert "but onnxruntime 1.32.0 is installed" in found["text"]
    assert "onnxruntime==1.32.0" in found["fixes"][0]


# Several packages


def of_the_driver(machine: Machine, cuda: int) -> Machine:
    """The same machine with a driver for another CUDA."""
    assert machine.cuda is not None
    assert machine.nvml is not None
    return machine.but(
        cuda=dataclasses.replace(machine.cuda, version=cuda * 1000),
        nvml=dataclasses.replace(machine.nvml, cuda=cuda * 1000, driver="525.60.13" if cuda == 12 else "580.65.06"),
    )


def for_cuda_12(provider: Path) -> bytes:
    """The real provider for CUDA 13, which asks for the libraries of CUDA 12 and for their versions."""
    content = bytearray(provider.read_bytes())
    offset, size = find_section(provider, ".gnu.version_r") or (0, 0)
    for name in set(re.findall(rb"\0(lib(?:cudart|cublas|cublasLt|nvrtc)\.so\.)13\0", bytes(content))):
        old, new = (struct.pack("<I", elf_hash(name + major)) for major in (b"13", b"12"))
        content[offset : offset + size] = content[offset : offset + size].replace(old, new)
        content = content.replace(b"\0" + name + b"13\0", b"\0" + name + b"12\0")
    return bytes(content)


def elf_hash(name: bytes) -> int:
    """The hash of a symbol's version in the System V ABI."""
    value = 0
    for each in name:
        value = (value << 4) + each
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


@pytest.fixture(scope="module")
def with_two_packages(module_lab: Lab) -> Machine:
    if installed.CUDA != 13:
        pytest.skip("the plugin for CUDA 12 is made of that for CUDA 13")
    machine = module_lab.machine_with_plugin()
    plugin = "onnxruntime_ep_cuda12"
    add_plugin(machine.overlay, plugin, content=for_cuda_12(provider_library()))
    library = machine.overlay.path(f"{plugin}/*providers_cuda*")
    for name, stub in module_lab.stubs.toolkit(str(library)).items():
        if name.endswith(".12"):
            machine.overlay.replace(f"nvidia/cuda_runtime/lib/{name}", stub)
    return machine


@pytest.mark.parametrize("cuda", [12, 13])
def test_the_package_for_the_drivers_cuda_is_chosen(with_two_packages: Machine, module_lab: Lab, cuda: int) -> None:
    code = f"""
    import ortgpu
    session = ortgpu.GPUSession({str(module_lab.models.relu)!r})
    import onnxruntime
    (device,) = (each for each in onnxruntime.get_ep_devices() if each.ep_name == {CUDA!r})
    report([session.get_providers(), dict(device.ep_metadata)["library_path"]])
    """
    bound, library = seen(of_the_driver(with_two_packages, cuda), code)
    assert bound == BOUND
    assert f"onnxruntime_ep_cuda{cuda}" in library


def test_a_package_whose_module_has_another_name(module_lab: Lab) -> None:
    """As that of onnxruntime-ep-nv-tensorrt-rtx-cu13, which goes without the number of CUDA."""
    machine = module_lab.machine_with_plugin()
    machine.overlay.rename(PLUGIN, "onnxruntime_ep_cuda")
    metadata = machine.overlay.path(f"{PLUGIN}-*.dist-info").name
    machine.overlay.replace(f"{metadata}/top_level.txt", b"onnxruntime_ep_cuda\n")
    assert machine.open_session(module_lab.models.relu).providers == (CUDA, CPU)
    make = f"attempt(lambda: onnxruntime.InferenceSession({str(module_lab.models.relu)!r}))"
    refused = seen(machine, f"import onnxruntime, ortgpu\nortgpu.install()\n{make}")
    assert seen(machine, f"{refused['fixes'][0]}\nortgpu.install()\n{make}")["providers"] == BOUND


@pytest.mark.parametrize("by_program", [False, True])
def test_a_plugin_for_a_newer_cuda_than_the_drivers(module_lab: Lab, by_program: bool) -> None:
    """It is refused before ONNX Runtime is called: its first call of CUDA fails, which may end the process."""
    machine = of_the_driver(module_lab.machine_with_plugin(packaged=not by_program), 12)
    if installed.CUDA > 12:
        machine = machine.but(env={**machine.env, "STUB_CUDART_CODE": "35"})
    make = f"attempt(lambda: ortgpu.GPUSession({str(module_lab.models.relu)!r}))"
    found = seen(machine, registering(make) if by_program else f"import ortgpu\n{make}")
    if installed.CUDA == 12:
        assert found["providers"] == BOUND, found
        return
    assert found.get("error") == "DriverTooOldError", found
    assert f"the CUDA plugin of ONNX Runtime needs CUDA {installed.CUDA}" in found["text"]
    assert "pip install" not in found["text"], "no package on the index has another plugin"


# The file of the GPU package, registered by the program


@pytest.mark.parametrize("name", [CUDA, "mine"])
def test_the_program_registers_the_built_in_provider(module_lab: Lab, name: str) -> None:
    machine = with_gpus(module_lab.machine_that_places(str(provider_library())), 2)
    machine = module_lab.with_pci_devices(machine, 2)
    make = f"""
found = []
with ortgpu.enforce():
    found.append(str(onnxruntime.InferenceSession({str(module_lab.models.relu)!r}, providers=[{CUDA!r}]).device))
found.append(str(ortgpu.GPUSession({str(module_lab.models.relu)!r}, device=1).device))
from ortgpu.provider.runtime import load_runtime
report([found, str(load_runtime().arrival), len(devices())])
"""
    (guarded, ours), arrival, count = seen(machine, registering(make, name, "onnxruntime/capi"))
    assert guarded.startswith("cuda:0")
    assert ours.startswith("cuda:1")
    assert arrival == "plugin registered by the program"
    assert count == 2
