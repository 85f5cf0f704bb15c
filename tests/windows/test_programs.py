"""Programs in Python for Windows: the command line, the guard, workers, wheels, and pytest. They run under Wine."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from typing import Any

import pytest

from tests.lab.environments import install
from tests.lab.models import Models
from tests.lab.windows import PYTHON, SITE_PACKAGES, Windows
from tests.support.children import ROOT, Child

pytestmark = [pytest.mark.windows, pytest.mark.timeout(1200)]

MODEL = "C:\\relu.onnx"
CAUSE = "LibraryNotFoundError"  # of a machine without CUDA
EXEC = ("-m", "ortgpu", "exec", "--")
CRASH = -0x3FFFFFFB  # 0xC0000005, an access violation; Wine hands on its last 8 bits
SETUPTOOLS = "setuptools==80.9.0"

# A program with a library that knows nothing of ortgpu.
LIBRARY = f"""
import onnxruntime
def opened(*providers):
    try:
        return onnxruntime.InferenceSession(r"{MODEL}", providers=list(providers) or None).get_providers()
    except Exception as error:
        return type(error).__name__
def found():
    return [opened("CUDAExecutionProvider"), opened(), opened("CPUExecutionProvider")]
"""
APP = f"{LIBRARY}\nimport json; print(json.dumps(found()))\n"
CPU = ["CPUExecutionProvider"]
GUARDED, SILENT = [CAUSE, CAUSE, CPU], [CPU, CPU, CPU]


@pytest.fixture(autouse=True)
def _a_model(module_windows: Windows, models: Models) -> None:
    module_windows.write(MODEL, models.relu.read_bytes())


def run(machine: Windows, code: str, *arguments: str, **variables: str) -> Any:
    """The JSON that a program prints last. It is a file, which the processes that it starts can import."""
    machine.write("C:\\program.py", textwrap.dedent(code).encode())
    return last_line(machine.python("C:\\program.py", *arguments, variables=variables))


def last_line(child: Child) -> Any:
    return json.loads(child.ok().stdout.splitlines()[-1])


@pytest.fixture
def ordinary(windows: Windows, models: Models) -> Windows:
    """A Windows whose Python reads its variables, as an installed one does; ortgpu is on PYTHONPATH alone."""
    windows.write(MODEL, models.relu.read_bytes())
    windows.write("C:\\app.py", APP.encode())
    windows.path("C:\\Python\\python311._pth").unlink()
    windows.variables["PYTHONPATH"] = "R:\\"
    windows.search("Python")
    return windows


# ortgpu exec


def test_exec_guards_a_program_and_what_it_starts(ordinary: Windows) -> None:
    ordinary.write("C:\\twice.py", f"{APP}import subprocess, sys; subprocess.run(['python', 'app.py'])".encode())
    found = ordinary.python(*EXEC, "python", "twice.py").ok()
    assert [json.loads(line) for line in found.stdout.splitlines()] == [GUARDED, GUARDED]
    assert last_line(ordinary.python("app.py")) == SILENT


@pytest.mark.slow
def test_exec_hands_on_the_exit_code(ordinary: Windows) -> None:
    assert ordinary.python(*EXEC, "python", "-c", f"import os; os._exit({CRASH})").returncode == CRASH & 0xFF
    assert ordinary.python(*EXEC, "cmd", "/c", "exit 3").returncode == 3
    found = ordinary.python(*EXEC, "no-such-program")
    assert (found.returncode, found.stderr) == (127, "ortgpu exec: no-such-program: not found\n")


def test_exec_starts_what_is_first_on_path(ordinary: Windows) -> None:
    """As a shell does: Windows itself looks beside the interpreter first, which is another than that of the folder."""
    ordinary.write("C:\\venv\\python.bat", b"@echo from the folder\r\n")
    ordinary.search("venv")
    assert ordinary.python(*EXEC, "python").ok().stdout == "from the folder\n"


def test_exec_refuses_a_portable_python_that_it_does_not_reach(module_windows: Windows) -> None:
    found = module_windows.python(*EXEC, PYTHON, "-c", "print('ran')")
    assert (found.returncode, found.stdout) == (2, "")
    assert f"{PYTHON} ignores the variables by which the guard reaches it, because of python311._pth" in found.stderr


# The guard in a program


def test_installed_in_a_program_before_and_after_the_import(module_windows: Windows) -> None:
    program = """
import json, ortgpu
{}
before = found()
{}
with ortgpu.enforce():
    inside = found()
ortgpu.uninstall()
print(json.dumps([before, inside, found()]))
"""
    assert run(module_windows, program.format("ortgpu.install()" + LIBRARY, "")) == [GUARDED, GUARDED, SILENT]
    assert run(module_windows, program.format(LIBRARY, "ortgpu.install()")) == [SILENT, GUARDED, SILENT]


def test_the_guard_leaves_the_cpu_with_a_warning_where_it_is_allowed(module_windows: Windows) -> None:
    program = f"""
import json, ortgpu, warnings
ortgpu.install()
{LIBRARY}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    session = onnxruntime.InferenceSession(r"{MODEL}")
    print(json.dumps([found(), sorted({{type(each.message).__name__ for each in seen}}),
                      [(record.kind, record.alive) for record in ortgpu.sessions()]]))
"""
    assert run(module_windows, program, ORTGPU_ALLOW_CPU="1") == [SILENT, ["CPUExecutionWarning"], [["guarded", True]]]


# Sessions of several processes, and many runs


def test_a_spawned_worker_opens_the_session_that_it_is_sent(module_windows: Windows) -> None:
    program = f"""
import json, multiprocessing, os, warnings
from concurrent.futures import ProcessPoolExecutor
import numpy, ortgpu
warnings.simplefilter("ignore")

def use(session, value):
    return [session.run(None, {{"x": numpy.full(4, value, "float32")}})[0].tolist(), str(session.device), os.getpid()]

def refused(path):
    ortgpu.GPUSession(path)

if __name__ == "__main__":
    session = ortgpu.GPUSession(r"{MODEL}", allow_cpu=True)
    with ProcessPoolExecutor(1) as pool:
        there = pool.submit(use, session, 3).result()
        error = pool.submit(refused, r"{MODEL}").exception()
    print(json.dumps([multiprocessing.get_start_method(), use(session, -1)[:2], there[:2], there[2] != os.getpid(),
                      type(error).__name__, error.fixes != ()]))
"""
    assert run(module_windows, program) == ["spawn", [[0] * 4, "cpu"], [[3] * 4, "cpu"], True, CAUSE, True]


def test_map_and_a_pool_on_the_cpu(module_windows: Windows) -> None:
    program = f"""
import json, warnings
import numpy, ortgpu
warnings.simplefilter("ignore")

def feeds(array=numpy.empty(4, "float32")):
    for value in range(50):
        array.fill(value)
        yield {{"x": array}}

with ortgpu.GPUSession(r"{MODEL}", allow_cpu=True) as session:
    one = [float(outputs[0].sum()) for outputs in session.map(feeds())]
with ortgpu.GPUSessionPool(r"{MODEL}", allow_cpu=True, sessions_per_device=2) as pool:
    many = [float(outputs[0].sum()) for outputs in pool.map(feeds())]
    later = pool.submit(None, {{"x": numpy.ones(4, "float32")}}).result()[0].tolist()
print(json.dumps([one, many, later]))
"""
    expected = [4.0 * value for value in range(50)]
    assert run(module_windows, program) == [expected, expected, [1] * 4]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("allow_cpu", "[[0. 0. 1. 2.]]"),
        pytest.param("pool", "[[0. 0. 1. 2.]]", marks=pytest.mark.slow),
        pytest.param("throughput", "mean: 2.0", marks=pytest.mark.slow),
    ],
)
def test_an_example(name: str, said: str, module_windows: Windows) -> None:
    program = f"R:\\examples\\{name}.py"
    assert said in module_windows.python(program, "--allow-cpu").ok().stdout
    refused = module_windows.python(program)
    assert (refused.returncode, "To fix it:" in refused.stdout or "No GPU can be used" in refused.stdout) == (1, True)


# Other commands


def test_demo(module_windows: Windows) -> None:
    found = module_windows.python("-m", "ortgpu", "demo").ok().stdout
    assert re.search(r"^  bound +CPUExecutionProvider$", found, re.MULTILINE)
    assert "no exception says so" in found
    assert f"{CAUSE}: the CUDA provider needs" in found


def test_check_on_the_cpu(module_windows: Windows) -> None:
    found = module_windows.python("-m", "ortgpu", "check", MODEL, "--allow-cpu", "--json").ok()
    document = json.loads(found.stdout)
    assert document["ok"]
    assert document["providers"] == CPU
    assert document["on_cpu_because"]["type"] == CAUSE


@pytest.mark.parametrize("command", [["preflight", "--json"], ["bench", MODEL, "--json"]])
def test_a_command_that_needs_a_gpu_says_why_there_is_none(command: list[str], module_windows: Windows) -> None:
    found = module_windows.python("-m", "ortgpu", *command)
    assert found.returncode == 1, found.output
    document = json.loads(found.stdout)
    assert not document["ok"]
    assert document["error"]["type"] == {"preflight": "UnsupportedPlatformError", "bench": CAUSE}[command[0]]


def test_tune_gives_the_advice_of_a_session(module_windows: Windows) -> None:
    """Its child judges, which a portable Python starts with other options than its own."""
    found = module_windows.python("-m", "ortgpu", "tune", MODEL)
    assert found.returncode == 1, found.output
    assert f"{CAUSE}: the CUDA provider needs" in found.stdout
    assert f"{PYTHON} has no pip" in found.stdout


def test_training_is_for_linux(module_windows: Windows) -> None:
    """Packages for it, and an environment of their own, would not be had."""
    found = module_windows.python("-m", "ortgpu", "doctor", "--profile", "training", "--json")
    assert found.returncode == 1, found.output
    assert [each["type"] for each in json.loads(found.stdout)["problems"]] == ["UnsupportedPlatformError"]


@pytest.mark.slow
def test_doctor_of_another_python(ordinary: Windows) -> None:
    """It is a portable one, in which neither ortgpu nor a working directory is on the path."""
    other = ordinary.path("C:\\Other")
    shutil.copytree(ordinary.path("C:\\Python"), other, copy_function=shutil.copy)
    shutil.rmtree(other / "Lib/site-packages/onnxruntime")
    ordinary.write("C:\\Other\\python311._pth", b"python311.zip\n.\nLib\\site-packages\nimport site\n")
    found = ordinary.python("-m", "ortgpu", "doctor", "--python", "C:\\Other\\python.exe", "--json", "--redact")
    assert found.returncode == 1, found.output
    assert json.loads(found.stdout)["problems"][0]["type"] == "OnnxRuntimeNotInstalledError"


@pytest.mark.slow
def test_a_process_that_is_left_holds_nobody(module_windows: Windows) -> None:
    """ONNX Runtime's import starts a desktop, in Wine, which inherits the output of the child that looked."""
    program = """
import json, sys, time
from ortgpu.environment import child
code = '''
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(40)"], close_fds=False)
print("done", flush=True)
'''
started = time.monotonic()
ended = child.run([sys.executable, "-c", code], timeout=30, together=True)
print(json.dumps([ended.returncode, ended.output.split(), time.monotonic() - started < 25]))
"""
    assert run(module_windows, program) == [0, ["done"], True]


@pytest.mark.slow
def test_a_library_that_ends_the_process_is_blamed(windows: Windows, models: Models) -> None:
    windows.write(MODEL, models.relu.read_bytes())
    windows.write(f"C:\\{SITE_PACKAGES}\\onnxruntime\\__init__.py", f"import os; os._exit({CRASH})".encode())
    found = windows.python("-m", "ortgpu", "doctor")
    assert found.returncode == 1, found.output
    assert "ended with exception 0xC0000005 in: import" in found.stdout
    assert re.search(r"^  process +died of exception 0xC0000005$", windows.python("-m", "ortgpu", "demo").stdout, re.M)


# pytest


@pytest.mark.slow
def test_the_plugin_of_pytest(windows: Windows) -> None:
    windows.install("pytest", "pluggy", "iniconfig")
    windows.write(
        "C:\\tests\\test_gpu.py",
        b"""
import pytest

@pytest.mark.ortgpu(memory="1GiB")
def test_marked():
    raise AssertionError

def test_with_a_session(gpu_session):
    raise AssertionError

def test_plain():
    pass
""",
    )
    pytest_there = ("-m", "pytest", "-p", "ortgpu.pytest_plugin", "-p", "no:cacheprovider", "-rs", "tests")
    skipped = windows.python(*pytest_there).ok()
    assert "1 passed, 2 skipped" in skipped.stdout
    assert "no GPU can be used: library-not-found" in skipped.stdout
    required = windows.python(*pytest_there, "--ortgpu=require")
    assert required.returncode == 1
    assert "1 passed, 2 errors" in required.stdout
    assert "A GPU is required: --ortgpu=require" in required.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_session_pickling", "test_pool", "test_pool_map", "test_tuning"])
def test_tests_that_need_no_gpu_pass_there(name: str, windows: Windows) -> None:
    windows.install("pytest", "pluggy", "iniconfig", "pytest-timeout")
    windows.write("C:\\pytest.ini", b"[pytest]\naddopts = --import-mode=importlib\nmarkers = slow\n")
    # No process of Windows sends itself an interrupt.
    chosen = ["-m", "not lab and not ortgpu and not slow", "-k", "not interrupt", f"R:\\tests\\session\\{name}.py"]
    options = ["-c", "C:\\pytest.ini", "--rootdir=R:\\", "-p", "no:cacheprovider", "-q"]
    found = windows.python("-m", "pytest", *options, *chosen, deadline=1000)
    assert re.search(r"^\d+ passed[^,]*(, \d+ deselected)?[^,]*$", found.ok().stdout, re.MULTILINE), found.output


# Wheels


@pytest.mark.slow
def test_a_package_that_requires_onnxruntime_does_not_bring_it_back(windows: Windows, models: Models) -> None:
    """`ortgpu hold` ends the printed fix. The middle would fetch the GPU package, whose metadata is enough here."""
    windows.write(MODEL, models.relu.read_bytes())
    windows.install("pip")
    windows.install_cpu_package()
    said = b"Metadata-Version: 2.1\nName: library\nVersion: 1\nRequires-Dist: onnxruntime>=1.18\n"
    windows.write(f"{SITE_PACKAGES}\\library-1.dist-info\\METADATA", said)
    found = json.loads(windows.python("-m", "ortgpu", "doctor", "--json").stdout)
    removal, *_, hold = found["problems"][0]["fixes"][0]["text"].splitlines()
    assert hold.endswith("-m ortgpu hold")
    said = b"Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31.1\n"
    gpu = f"{SITE_PACKAGES}\\onnxruntime_gpu-1.31.1.dist-info"
    windows.write(f"{gpu}\\METADATA", said)
    windows.write(f"{gpu}\\RECORD", b"onnxruntime/capi/later.py,,\nonnxruntime_gpu-1.31.1.dist-info/METADATA,,\n")
    commands = [removal, hold]
    code = f"import subprocess\nfor line in {commands!r}: subprocess.run(line, shell=True, check=True)"
    windows.python("-c", code, variables={"PIP_NO_INDEX": "1"}, deadline=400).ok()
    again = windows.python("-m", "pip", "install", "--no-index", "onnxruntime>=1.18", deadline=200).ok()
    assert "Requirement already satisfied: onnxruntime>=1.18" in again.stdout
    assert "library 1 requires" not in windows.python("-m", "pip", "check", deadline=200).stdout
    assert not (windows.site / "onnxruntime/__init__.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ordinary", "editable"])
def test_a_wheel_is_built_installed_and_removed(how: str, windows: Windows, models: Models) -> None:
    """In a portable Python, which has nothing but what is installed in it."""
    windows.write(MODEL, models.relu.read_bytes())
    windows.write("C:\\app.py", APP.encode())
    windows.write("C:\\Python\\python311._pth", b"python311.zip\n.\nLib\\site-packages\nimport site\n")
    windows.install("pip")
    windows.install("setuptools", site=install("windows-setuptools", [SETUPTOOLS]))
    source = windows.path("C:\\the source")
    shutil.copytree(ROOT / "ortgpu", source / "ortgpu", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-warn-script-location"]
    editable = ["--editable"] if how == "editable" else []
    windows.python("-m", "pip", "install", *options, *editable, "C:\\the source", deadline=600).ok()

    place = windows.python("-c", "import ortgpu; print(ortgpu.__file__)").ok().stdout
    assert place.startswith("C:\\the source" if editable else f"C:\\{SITE_PACKAGES}")
    assert last_line(windows.python("app.py")) == SILENT
    assert last_line(windows.python("app.py", variables={"ORTGPU_ENFORCE": "1"})) == GUARDED
    assert last_line(windows.python(*EXEC, PYTHON, "app.py")) == GUARDED
    script = r"import subprocess; subprocess.check_call(['C:\Python\Scripts\ortgpu.exe', '--version'])"
    assert windows.python("-c", script).ok().stdout.startswith("ortgpu 0.")

    windows.python("-m", "pip", "uninstall", "--yes", "ortgpu", deadline=600).ok()
    left = [path.name for path in windows.site.rglob("*") if path.suffix != ".pyc" and path.is_file()]
    assert not [name for name in left if "ortgpu" in name or name in ("ERRORS.md", "gpu_session.py")]
    assert last_line(windows.python("app.py", variables={"ORTGPU_ENFORCE": "1"})) == SILENT
