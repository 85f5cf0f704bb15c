"""The lab breaks what it says it breaks, and nothing else: tests about broken environments rest on it."""

from __future__ import annotations

import hashlib
import signal
import time
from importlib import metadata
from pathlib import Path

import pytest

from tests.lab import GPU, NVML, Cuda, LabError, Overlay, Stubs
from tests.lab import overlay as overlay_module
from tests.lab.fixtures import Lab

CURAND = "nvidia/*/lib/libcurand.so.*"
CUBLAS_LT = "nvidia/*/lib/libcublasLt.so.*"
PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"

H200 = GPU(uuid="GPU-11111111-2222-3333-4444-555555555555", name="NVIDIA H200", capability=(9, 0))
PASCAL = GPU(uuid="GPU-aaaaaaaa-2222-3333-4444-555555555555", name="Tesla P4", capability=(6, 1), total=8 << 30)


def source_state(lab: Lab) -> str:
    """A digest of what the real environment consists of, for the folders that tests break."""
    source = overlay_module.installed_site()
    digest = hashlib.sha256()
    for pattern in ("onnxruntime/**/*", "nvidia/*/lib/*", "onnxruntime_gpu*/*"):
        for path in sorted(source.glob(pattern)):
            digest.update(f"{path.relative_to(source)} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()


# Overlay


def test_every_operation_leaves_the_real_environment_as_it_was(lab: Lab) -> None:
    before = source_state(lab)
    overlay = lab.overlay()
    overlay.truncate(CUBLAS_LT, 4096).remove(CURAND, "onnxruntime/capi/build_and_package_info.py")
    overlay.replace("onnxruntime/__init__.py", b"raise ImportError").rename("nvidia/cudnn", "nvidia/elsewhere")
    overlay.add_wheel(lab.wheels.cpu_twin).uninstall("onnxruntime")
    overlay.uninstall("onnxruntime-gpu").reinstall("onnxruntime-gpu")
    assert source_state(lab) == before


def test_the_child_imports_from_the_overlay_and_only_from_it(lab: Lab) -> None:
    machine = lab.machine()
    seen = machine.run(
        "import sys, numpy, onnxruntime, ortgpu, importlib.metadata as m\n"
        "report({'path': sys.path, 'prefix': sys.prefix, 'onnxruntime': onnxruntime.__file__,"
        " 'version': m.version('onnxruntime-gpu'), 'ortgpu': ortgpu.__file__})"
    ).ok()
    assert seen.json["prefix"] == str(machine.overlay.root)
    assert seen.json["onnxruntime"].startswith(str(machine.overlay.site))
    assert seen.json["version"] == metadata.version("onnxruntime-gpu")
    assert [entry for entry in seen.json["path"] if "site-packages" in entry] == [str(machine.overlay.site)]
    import ortgpu

    assert Path(seen.json["ortgpu"]).samefile(str(ortgpu.__file__))


def test_nothing_of_this_process_leaks_into_the_child(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    seen = lab.machine(env={"CUDA_HOME": "/opt/cuda", "LANG": None}).run("report(dict(os.environ))").ok()
    assert seen.json["CUDA_HOME"] == "/opt/cuda"
    assert not {"CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LANG"} & set(seen.json)


LOAD = """
import ctypes, sys
def load(path):
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return str(error)
"""


def test_a_removed_library_is_not_found_beside_the_linked_ones(lab: Lab) -> None:
    """$ORIGIN of a linked library is the overlay's folder, not the folder that the link leads to."""
    machine = lab.machine()
    cublas = machine.overlay.path("nvidia/*/lib/libcublas.so.*")
    code = f"{LOAD}report([load({str(cublas)!r}), open('/proc/self/maps').read()])"
    error, maps = machine.run(code).ok().json
    assert error is None
    assert str(cublas) in maps or cublas.is_symlink()
    machine.overlay.remove(CUBLAS_LT)
    error, maps = machine.run(code).ok().json
    assert "libcublasLt.so" in error
    assert "cannot open shared object file: No such file or directory" in error
    assert "libcublas" not in maps


@pytest.mark.parametrize(
    ("size", "words"), [(40, "file too short"), (100, "cannot read file data"), (10_000, None)], ids=str
)
def test_a_truncated_library_is_refused_or_kills(lab: Lab, size: int, words: str | None) -> None:
    """The loader refuses a file without whole headers, and maps any other one beyond its end."""
    machine = lab.machine()
    machine.overlay.truncate(CURAND, size)
    path = machine.overlay.path(CURAND)
    assert path.stat().st_size == size
    result = machine.run(f"{LOAD}report(load({str(path)!r}))")
    if words is None:
        assert result.returncode == -signal.SIGBUS
    else:
        assert words in result.ok().json


def test_a_pattern_that_matches_nothing_is_an_error(lab: Lab) -> None:
    overlay = lab.overlay()
    with pytest.raises(LabError, match=r"nothing in .* matches nvidia/\*/lib/libnothing"):
        overlay.remove("nvidia/*/lib/libnothing.so")
    with pytest.raises(LabError, match="matches"):
        overlay.path("nvidia/*/lib/*")


def test_duplicate_rename_and_replace(lab: Lab, stubs: Stubs) -> None:
    machine = lab.machine()
    overlay = machine.overlay
    curand = overlay.path(CURAND)
    overlay.duplicate(CURAND, "elsewhere/libcurand.so.10").duplicate("nvidia/cudnn", "nvidia/copy")
    assert (overlay.site / "elsewhere/libcurand.so.10").samefile(curand)
    assert (overlay.site / "nvidia/copy/lib/libcudnn.so.9").exists()
    overlay.rename("nvidia/cudnn/lib/libcudnn.so.9", "nvidia/cudnn/lib/libcudnn.so.8")
    assert not (overlay.site / "nvidia/cudnn/lib/libcudnn.so.9").exists()
    overlay.replace("nvidia/cudnn/lib/libcudnn.so.9", stubs.library("libcudnn.so.9", {"cudnnGetVersion": 8907}))
    cudnn = str(overlay.path("nvidia/cudnn/lib/libcudnn.so.9"))
    assert machine.run(f"import ctypes; report(ctypes.CDLL({cudnn!r}).cudnnGetVersion())").ok().json == 8907


def test_distributions_come_and_go_as_with_pip(lab: Lab) -> None:
    machine = lab.machine()
    overlay = machine.overlay
    look = (
        "import importlib.metadata as m, json\n"
        "names = sorted(d for d in m.packages_distributions().get('onnxruntime', []))\n"
        "import onnxruntime\n"
        "report([names, getattr(onnxruntime, 'get_available_providers', list)()])"
    )
    assert machine.run(look).ok().json[0] == ["onnxruntime-gpu"]
    overlay.add_wheel(lab.wheels.cpu_twin)
    names, providers = machine.run(look).ok().json
    assert set(names) == {"onnxruntime", "onnxruntime-gpu"}
    assert "CUDAExecutionProvider" not in providers
    overlay.reinstall("onnxruntime-gpu")
    assert "CUDAExecutionProvider" in machine.run(look).ok().json[1]
    overlay.uninstall("onnxruntime")
    names, providers = machine.run(look).ok().json
    assert providers == [], "what the twins share is gone, and a namespace package is left"
    overlay.uninstall("onnxruntime-gpu")
    assert not (overlay.site / "onnxruntime").exists()
    assert "No module named 'onnxruntime'" in machine.run("import onnxruntime").stderr


def test_without_onnxruntime_gpu_the_lab_says_so(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(overlay_module, "GPU_DISTRIBUTION", "onnxruntime-absent")
    with pytest.raises(LabError, match="onnxruntime-absent is not installed"):
        Overlay(tmp_path / "none")


# Child


def test_code_that_hangs_is_killed_with_all_it_started(lab: Lab) -> None:
    result = lab.machine().run(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('started', flush=True)\n"
        "report([os.getpid(), child.pid])\n"
        "time.sleep(600)",
        timeout=3,
    )
    assert result.timed_out
    assert result.returncode == -signal.SIGKILL
    assert result.stdout == "started\n"
    assert_gone(result.json)


def test_what_a_child_leaves_behind_is_killed_and_does_not_hold_it_up(lab: Lab) -> None:
    result = lab.machine().run(
        "import subprocess, sys\n"
        "report([subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid])",
        timeout=30,
    )
    assert not result.ok().timed_out
    assert_gone(result.json)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    for pid in pids:
        while alive(pid):
            assert time.monotonic() < deadline, f"process {pid} lives"
            time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_below_python_and_the_signal_of_a_crash_are_seen(lab: Lab) -> None:
    result = lab.machine().run("os.write(1, b'out'); os.write(2, b'err'); os.abort()")
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGABRT, "out", "err")
    assert result.json is None
    with pytest.raises(AssertionError, match="exit status -6"):
        result.ok()


def test_arguments_for_the_interpreter(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine()
    assert machine.run(argv=["-m", "json.tool", "--help"]).ok().stdout.startswith("usage")
    assert machine.run("import sys; report([sys.argv[1:], os.getcwd()])", argv=["x"], cwd=tmp_path).json == [
        ["x"],
        str(tmp_path),
    ]


# Stub libraries


def test_what_this_machine_has_of_cuda_is_hidden(lab: Lab) -> None:
    """Otherwise a driver or a toolkit of the machine would mend what a test breaks."""
    names = ["libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.13", "libcudart.so.12", "libcudnn.so.9"]
    code = f"{LOAD}report([load(name) for name in {names!r}] + [load('libm.so.6')])"
    *errors, math = lab.machine().run(code).ok().json
    assert errors == [f"{name}: cannot open shared object file: No such file or directory" for name in names]
    assert math is None
    assert lab.machine(cuda=Cuda(), nvml=NVML()).run(code).ok().json[:3] == [None, None, errors[2]]
    patterns = ["/dev/nvidia*", "/usr/local/cuda*", "/usr/lib/*/libcud*", "/etc/*"]
    look = f"import glob; report([glob.glob(pattern) for pattern in {patterns!r}])"
    devices, toolkits, libraries, others = lab.machine().run(look).ok().json
    assert not [*devices, *toolkits, *libraries]
    assert "/etc/passwd" in others
    assert "No such file" in lab.machine().run("open('/etc/ld.so.cache', 'rb')").stderr


CU = """
import ctypes
from ctypes import byref, c_int, c_size_t
cu = ctypes.CDLL("libcuda.so.1")
def devices():
    count = c_int()
    state = cu.cuInit(0) or cu.cuDeviceGetCount(byref(count))
    if state:
        return state
    found = []
    for ordinal in range(count.value):
        name, uuid = ctypes.create_string_buffer(96), (ctypes.c_ubyte * 16)()
        major, minor, size = c_int(), c_int(), c_size_t()
        assert not cu.cuDeviceGetName(name, 96, ordinal)
        assert not cu.cuDeviceGetUuid_v2(uuid, ordinal)
        assert not cu.cuDeviceComputeCapability(byref(major), byref(minor), ordinal)
        assert not cu.cuDeviceTotalMem_v2(byref(size), ordinal)
        found.append([name.value.decode(), bytes(uuid).hex(), major.value, minor.value, size.value])
    return found
"""


@pytest.mark.parametrize(
    ("visible", "order", "names"),
    [
        (None, None, ["NVIDIA H200", "Tesla P4"]),
        (None, "PCI_BUS_ID", ["Tesla P4", "NVIDIA H200"]),
        ("1", "PCI_BUS_ID", ["NVIDIA H200"]),
        ("1,0", None, ["Tesla P4", "NVIDIA H200"]),
        ("GPU-aaaa", None, ["Tesla P4"]),
        ("0,7,1", None, ["NVIDIA H200"]),
        ("", None, 100),
        ("-1", None, 100),
    ],
)
def test_the_stub_driver_shows_its_devices(
    lab: Lab, visible: str | None, order: str | None, names: list[str] | int
) -> None:
    machine = lab.machine(
        cuda=Cuda(devices=(PASCAL, H200)), env={"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    )
    seen = machine.run(f"{CU}report(devices())").ok().json
    assert (seen if isinstance(seen, int) else [device[0] for device in seen]) == names
    if visible == "GPU-aaaa":
        assert seen == [["Tesla P4", PASCAL.uuid[4:].replace("-", ""), 6, 1, 8 << 30]]


def test_the_stub_driver_fails_as_it_is_told(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(init=803, version=12080))
    code = f"{CU}version = c_int(); cu.cuDriverGetVersion(byref(version)); report([devices(), version.value])"
    assert machine.run(code).ok().json == [803, 12080]


NVML_LOOK = """
import pynvml
def look():
    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            mig = pynvml.nvmlDeviceGetMigMode(handle)[0]
        except pynvml.NVMLError_NotSupported:
            mig = None
        found.append({
            "uuid": pynvml.nvmlDeviceGetUUID(handle), "name": pynvml.nvmlDeviceGetName(handle),
            "capability": pynvml.nvmlDeviceGetCudaComputeCapability(handle),
            "memory": [memory.total, memory.free, memory.used],
            "mode": pynvml.nvmlDeviceGetComputeMode(handle), "mig": mig,
            "bus": pynvml.nvmlDeviceGetPciInfo(handle).busId,
            "processes": [[p.pid, p.usedGpuMemory] for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
            "migs": [
                pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))
                for i in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) if i < 2 and mig
            ],
        })
    return found
"""


def test_the_real_nvml_binding_reads_the_stub(lab: Lab) -> None:
    busy = GPU(
        uuid="GPU-22222222-2222-3333-4444-555555555555",
        name="NVIDIA A100",
        capability=(8, 0),
        total=100,
        free=40,
        compute_mode=3,
        mig=True,
        mig_uuids=("MIG-1", "MIG-2"),
        processes=((7, 20), (8, 30)),
    )
    machine = lab.machine(nvml=NVML(gpus=(H200, busy), driver="575.1", cuda=12090))
    seen = machine.run(
        f"{NVML_LOOK}report([look(), pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2(),"
        f"pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID({busy.uuid!r}))])"
    ).ok()
    gpus, driver, cuda, name = seen.json
    assert (driver, cuda, name) == ("575.1", 12090, "NVIDIA A100")
    assert gpus[0]["uuid"] == H200.uuid
    assert gpus[0]["mig"] is None
    assert gpus[1] == {
        "uuid": busy.uuid,
        "name": "NVIDIA A100",
        "capability": [8, 0],
        "memory": [100, 40, 60],
        "mode": 3,
        "mig": 1,
        "bus": "00000000:02:00.0",
        "processes": [[7, 20], [8, 30]],
        "migs": ["MIG-1", "MIG-2"],
    }


@pytest.mark.parametrize(
    ("nvml", "code"),
    [(NVML(init=9), 9), (NVML(init=18), 18), (NVML(error=999), 999), (None, 12)],
    ids=["driver-not-loaded", "version-mismatch", "unknown", "absent"],
)
def test_the_stub_nvml_fails_as_it_is_told(lab: Lab, nvml: NVML | None, code: int) -> None:
    seen = lab.machine(nvml=nvml).run(
        f"{NVML_LOOK}\ntry:\n    look()\nexcept pynvml.NVMLError as error:\n    report(error.value)"
    )
    assert seen.ok().json == code


# What plain ONNX Runtime does: the faults are real. The README beside the lab quotes these.


@pytest.mark.parametrize(
    ("cuda", "text"),
    [
        (Cuda(version=12080), "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version"),
        (Cuda(init=100), "CUDA failure 100: no CUDA-capable device is detected"),
        (Cuda(init=101), "CUDA failure 101: invalid device ordinal"),
        (Cuda(init=3), "CUDA failure 3: initialization error"),
        (Cuda(init=803), "CUDA failure 803: system has unsupported display driver / cuda driver combination"),
        (Cuda(init=999), "CUDA failure 999: unknown error"),
        (Cuda(devices=(H200,)), "CUDA failure 500: named symbol not found"),
    ],
    ids=["35", "100", "101", "3", "803", "999", "500"],
)
def test_a_bad_driver_is_printed_and_the_session_is_on_the_cpu(lab: Lab, cuda: Cuda, text: str) -> None:
    outcome = lab.machine(cuda=cuda).open_plain_session(lab.models.relu)
    assert outcome.providers == ("CPUExecutionProvider",)
    assert outcome.signs == {"printed"}
    assert text in outcome.result.stdout
    assert "EP Error" in outcome.result.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_id": "0"}, 'Failed to parse provider option "device_id": CUDA failure 100'),
        ({"devise_id": "0"}, 'Unknown provider option: "devise_id"'),
        ({"arena_extend_strategy": "kNever"}, 'Failed to parse provider option "arena_extend_strategy"'),
    ],
    ids=["device", "name", "value"],
)
def test_a_bad_option_is_printed_and_the_session_is_on_the_cpu(lab: Lab, options: dict[str, str], text: str) -> None:
    machine = lab.machine(cuda=Cuda(init=100))
    outcome = machine.open_plain_session(lab.models.relu, providers=[("CUDAExecutionProvider", options)])
    assert outcome.providers == ("CPUExecutionProvider",)
    assert "printed" in outcome.signs
    assert text in outcome.result.stdout


def test_no_driver_is_logged_and_the_session_is_on_the_cpu(lab: Lab) -> None:
    outcome = lab.machine().open_plain_session(lab.models.relu)
    assert outcome.providers == ("CPUExecutionProvider",)
    assert outcome.signs == {"logged"}
    assert "libcuda.so.1: cannot open shared object file" in outcome.result.stderr
    assert "Failed to create CUDAExecutionProvider" in outcome.result.stderr


def test_a_missing_library_is_logged_and_the_session_is_on_the_cpu(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(init=100))
    machine.overlay.remove(CURAND)
    outcome = machine.open_plain_session(lab.models.relu)
    assert outcome.providers == ("CPUExecutionProvider",)
    assert "libcurand.so.10: cannot open shared object file" in outcome.result.stderr


def test_no_provider_asked_for_is_silent(lab: Lab) -> None:
    outcome = lab.machine().open_plain_session(lab.models.relu, providers=None, preload=False)
    assert outcome.providers == ("CPUExecutionProvider",)
    assert outcome.signs <= {"logged"}


def test_an_unknown_provider_is_warned_about(lab: Lab) -> None:
    outcome = lab.machine().open_plain_session(lab.models.relu, providers=["cuda"], preload=False)
    assert outcome.providers == ("CPUExecutionProvider",)
    assert outcome.signs == {"warned", "printed"}


def test_models_run_on_the_cpu(lab: Lab) -> None:
    for model in (lab.models.relu, lab.models.matmul, lab.models.conv):
        outcome = lab.machine().open_plain_session(model, providers=["CPUExecutionProvider"], preload=False)
        assert outcome.providers == ("CPUExecutionProvider",), outcome.result.output


def test_an_open_call_that_dies_is_an_abort(lab: Lab) -> None:
    machine = lab.machine()
    machine.overlay.replace("onnxruntime/__init__.py", b"import os; os.abort()")
    outcome = machine.open_plain_session(lab.models.relu)
    assert outcome.signs == {"aborted"}
    assert outcome.result.returncode == -signal.SIGABRT
