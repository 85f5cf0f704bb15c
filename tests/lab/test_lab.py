"""The lab breaks what it says it breaks, and nothing else: tests about broken environments rest on it."""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from tests.lab import NVML, Cuda, LabError, Overlay, Stubs
from tests.lab import overlay as overlay_module
from tests.lab.fixtures import Lab
from tests.lab.wheels import Wheels

CURAND = "nvidia/*/lib/libcurand.so.*"
CUBLAS_LT = "nvidia/*/lib/libcublasLt.so.*"
PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"


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
    compiled = f"onnxruntime/__pycache__/__init__.{sys.implementation.cache_tag}.pyc"
    overlay.replace(compiled, b"")  # as an import leaves it, which no RECORD names
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
    assert result.returncode is None
    assert result.stdout == "started\n"
    assert_gone(result.json)


def test_what_a_child_leaves_behind_is_killed_and_does_not_hold_it_up(lab: Lab) -> None:
    result = lab.machine().run(
        "import subprocess, sys\n"
        "report([subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid])",
        timeout=30,
    )
    assert_gone(result.ok().json)


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
    with pytest.raises(AssertionError, match="SIGABRT"):
        result.ok()


def test_arguments_for_the_interpreter(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine()
    assert machine.run(argv=["-m", "json.tool", "--help"]).ok().stdout.startswith("usage")
    assert machine.run("import sys; report([sys.argv[1:], os.getcwd()])", argv=["x"], cwd=tmp_path).json == [
        ["x"],
        str(tmp_path),
    ]


# This machine


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


# Wheels


def test_wheels_of_another_interpreter_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache stays when the virtual environment is made anew with another Python."""
    here = Wheels(tmp_path)
    (here.folder / "some_thing-1.0-cp312-cp312-linux_x86_64.whl").touch()
    assert here.get("some-thing", "1.0").parent == here.folder
    monkeypatch.setattr(sys.implementation, "cache_tag", "another")
    assert list(Wheels(tmp_path).folder.iterdir()) == []
