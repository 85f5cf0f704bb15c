"""Every program and page of the guide, run as its reader would run it: in processes, with and without a GPU to use."""

from __future__ import annotations

import ctypes
import doctest
import functools
import html
import importlib.util
import os
import re
import shlex
import sys
import venv
from pathlib import Path

import onnx.parser
import pytest

from ortgpu.distributed.environment import read_training_packages
from ortgpu.environment.packages.installed import locate_packages
from tests.gpu.plugin import registered_only
from tests.lab import launchers
from tests.lab.fixtures import Lab
from tests.support.children import Child, run_child
from tests.support.pictures import PICTURES, write_pictures

pytestmark = pytest.mark.lab

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE = 110  # seconds: a process that opens a first session on a slow machine needs a fraction of it

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # the state of most machines, and one that any machine can be put into


def run(name: str, *arguments: str, env: dict[str, str] | None = None) -> Child:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return run_child(command, env={**os.environ, **(env or {})}, deadline=DEADLINE)


def test_every_example_is_tested() -> None:
    tested = {
        "drop_in",
        "application",
        "allow_cpu",
        "guard",
        "pool",
        "ranks",
        "throughput",
        "test_with_gpu",
        "train_data_parallel",
        "check_libraries",
    }
    elsewhere = {
        "ray_data", "ray_serve",  # test_ray_matrix.py and gpu/test_ray.py
        "service",  # test_service.py and test_container.py
    }  # fmt: skip
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested | elsewhere


def test_drop_in_ends_with_the_cause() -> None:
    result = run("drop_in.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert "running on" not in result.stdout
    last = result.stderr[result.stderr.rindex("\nortgpu.errors.") :]
    assert "To fix it:" in last


def test_what_a_model_needs_is_checked_without_a_gpu(lab: Lab) -> None:
    machine = lab.machine()
    machine.overlay.remove("nvidia/cudnn")

    def checked(model: Path) -> Child:
        return machine.run(argv=[str(EXAMPLES / "check_libraries.py"), str(model)])

    assert "is installed" in checked(lab.models.matmul).ok().stdout
    lacking = checked(lab.models.conv)
    assert lacking.returncode == 1, lacking
    assert "libcudnn.so.9" in lacking.stdout
    assert "cufft" not in lacking.stdout


def test_application_logs_cause_and_fix() -> None:
    result = run("application.py", env=NO_GPU)
    assert result.returncode == 69, result
    assert "Traceback" not in result.stderr
    assert "CRITICAL cannot start [" in result.stderr
    assert "to fix it: " in result.stderr


def test_cpu_is_refused_unless_allowed() -> None:
    result = run("allow_cpu.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert "No GPU can be used" in result.stdout


def test_cpu_is_used_loudly_when_allowed() -> None:
    result = run("allow_cpu.py", "--allow-cpu", env=NO_GPU)
    assert result.returncode == 0, result
    assert "This will be slow:" in result.stdout
    assert "running on the CPU, as allowed" in result.stdout
    assert "[[0. 0. 1. 2.]]" in result.stdout


def test_pool_ends_with_the_cause() -> None:
    result = run("pool.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert "running on" not in result.stdout
    assert "To fix it:" in result.stdout


def test_pool_works_on_the_cpu_when_allowed() -> None:
    result = run("pool.py", "--allow-cpu", env=NO_GPU)
    assert result.returncode == 0, result
    assert "running on\n  cpu\n" in result.stdout
    assert f"sum of all results: {64 * 4 * sum(range(95))}" in result.stdout
    assert "[[0. 0. 1. 2.]]" in result.stdout


def test_throughput_ends_with_the_cause() -> None:
    result = run("throughput.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert result.stdout.startswith("No GPU can be used ("), result


def test_throughput_on_the_cpu_when_allowed() -> None:
    result = run("throughput.py", "--allow-cpu", env=NO_GPU)
    assert result.returncode == 0, result
    assert "20 batches on cpu" in result.stdout
    assert "mean: 2.0" in result.stdout


@pytest.mark.ortgpu
@pytest.mark.usefixtures("gpus")
def test_throughput_on_the_gpu() -> None:
    result = run("throughput.py")
    assert result.returncode == 0, result
    assert "20 batches on cuda:0" in result.stdout
    assert "cudnn_conv_algo_search=HEURISTIC: " in result.stdout
    assert "mean: 2.0" in result.stdout


def test_guard_ends_with_the_cause() -> None:
    result = run("guard.py", env=NO_GPU)
    assert result.returncode == 1, result
    assert result.stdout.startswith("No GPU can be used ("), result
    assert "result:" not in result.stdout


@pytest.mark.skipif(
    read_training_packages(locate_packages().onnxruntime.folder).api_folder is not None,
    reason="the training API is installed here",
)
def test_training_says_why_there_is_none() -> None:
    """That it trains, and what: tests/training_matrix/test_training.py."""
    result = run("train_data_parallel.py")
    assert result.returncode == 69, result
    assert result.stderr.startswith("cannot train: onnxruntime.training is not available: "), result
    assert "To fix it:" in result.stderr


def test_a_rank_that_fails_after_the_preflight_is_heard_of(lab: Lab) -> None:
    """The lab's CUDA runtime does for NCCL and for no session: the ranks meet, and none has its own."""
    job = launchers.launch_command(lab.machine_with_nccl(), "environment", 2, [str(EXAMPLES / "ranks.py")])
    assert job.status == 1
    assert "all ranks are alike" in job.result.stdout
    assert "To fix it:" in job.result.stdout
    assert "\nrank 1: " in f"\n{job.result.stderr}", job.result.output


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "torchrun"])
def test_ranks_end_with_the_cause_said_once(launcher: str) -> None:
    launchers.need(launcher)
    [(command, _)] = launchers.starts_of(launcher, 2, [sys.executable, str(EXAMPLES / "ranks.py")])
    env = {**os.environ, **launchers.AS_ROOT, **NO_GPU}
    result = run_child(command, env=env, deadline=DEADLINE)
    assert result.returncode != 0, result
    assert result.stdout.count("To fix it:") == 1, result
    assert "on ranks 0, 1, on " in result.stdout


@pytest.mark.ortgpu
@registered_only
@pytest.mark.usefixtures("gpus")
def test_guard_lists_both_sessions() -> None:
    result = run("guard.py")
    assert result.returncode == 0, result
    detector, recognizer, *_ = result.stdout.splitlines()
    assert detector.startswith("<bytes> on cpu [cpu], created by "), result
    assert recognizer.startswith("<bytes> on cuda:0"), result
    assert "[guarded]" in recognizer


@pytest.mark.ortgpu
@pytest.mark.parametrize(
    "name",
    ["drop_in.py", "application.py", "allow_cpu.py", pytest.param("guard.py", marks=registered_only), "pool.py"],
)
@pytest.mark.usefixtures("gpus")
def test_runs_on_the_gpu(name: str) -> None:
    result = run(name)
    assert result.returncode == 0, result
    assert "cuda:0" in result.stdout + result.stderr
    assert "[[0. 0. 1. 2.]]" in result.stdout + result.stderr


def run_pytest(*arguments: str, env: dict[str, str] | None = None) -> Child:
    """Run the example with tests. ``-p``: these tests may run where the library is importable and not installed."""
    options = ["-p", "ortgpu.pytest_plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return run_child(command, env={**os.environ, "ORTGPU_GPU": "", **(env or {})}, deadline=DEADLINE)


def test_tests_are_skipped_or_fail_without_a_gpu() -> None:
    skipped = run_pytest("examples/test_with_gpu.py", env=NO_GPU)
    assert skipped.returncode == 0, skipped
    assert "3 skipped" in skipped.stdout
    assert "no GPU can be used: " in skipped.stdout
    required = run_pytest("examples/test_with_gpu.py", "--ortgpu=require", env=NO_GPU)
    assert required.returncode == 1, required
    assert "3 errors" in required.stdout
    assert "To fix it:" in required.stdout


@pytest.mark.ortgpu
@pytest.mark.usefixtures("gpus")
def test_tests_run_on_the_gpu() -> None:
    result = run_pytest("examples/test_with_gpu.py", "--ortgpu=require")
    assert result.returncode == 0, result
    assert "3 passed" in result.stdout


# The pages. A block of Python whose first line is "# name.py" is that file. In a block of `console`, a line after "$ "
# is a command, and below it stands what it prints. The commands of a page run in a folder with these and model.onnx.


PAGES = [EXAMPLES.parent / "README.md", *sorted(EXAMPLES.glob("*.md"))]
MODEL = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> list[tuple[str, str]]:
    """Return each command of a page with what it prints according to the page."""
    found = "".join(blocks_of(page, "console"))
    return [(line, text) for line, text in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", found, re.MULTILINE)]


def programs_of(page: Path) -> dict[str, str]:
    """Return the files that a page shows."""
    blocks = blocks_of(page, "python")
    return {name: block for block in blocks for name in re.findall(r"\A# (\w+\.py)\n", block)}


def write_commands(folder: Path) -> None:
    """Write the programs that the pages call, as they are for a reader who has activated this environment."""
    folder.mkdir()
    python = shlex.quote(sys.executable)
    pytest_options = "-p ortgpu.pytest_plugin -p no:cacheprovider"
    targets = {
        "python": python,
        "ortgpu": f"{python} -m ortgpu",
        "pytest": f"{python} -m pytest {pytest_options}",
    }
    usable = (name for name in ("mpich", "openmpi") if launchers.why_not_here(name) is None)
    for launcher in usable:
        [(command, _)] = launchers.starts_of(launcher, 0, [])
        targets["mpirun"] = shlex.join(command[: command.index("-n")])
        break
    for name, target in targets.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {target} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)


def comparable(text: str) -> str:
    """Take out what differs between machines: evidence, fixes, columns of tables after the first, paths, numbers."""
    text = re.sub(r"^(?:  - |    \S).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^  (\S+(?: \S+)*)  .*$", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"\d[\d.,e+-]*", "0", re.sub(r"(?:/[\w.@+-]+)+", "/path", text))


def need_the_machine_of_the_pages(page: Path) -> None:
    """Skip the test where this is another machine than the one that the pages show, or lacks what a page needs."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("the pages show a machine without an NVIDIA driver")
    text = "".join((*blocks_of(page, "console"), *programs_of(page).values()))
    if "mpirun" in text and not any(launchers.why_not_here(name) is None for name in ("mpich", "openmpi")):
        pytest.skip("there is no mpirun")
    for name in ("ray", "fastapi"):
        if re.search(f"(import|from) {name}", text) and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.stem)
def test_commands_of_a_page_print_what_it_says(page: Path, tmp_path: Path) -> None:
    need_the_machine_of_the_pages(page)
    write_commands(tmp_path / "bin")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "model.onnx").write_bytes(onnx.parser.parse_model(MODEL).SerializeToString())
    for name, code in programs_of(page).items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    # With PYTHONUNBUFFERED a rank writes a line and its end apart, and another rank's line may come between.
    ours = ("ORTGPU_", "CUDA_", "PYTHONUNBUFFERED")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    search = f"{tmp_path / 'bin'}{os.pathsep}{variables['PATH']}"
    for command, expected in commands_of(page):
        done = run_child(
            ["/bin/sh", "-c", command],
            env={**variables, **launchers.AS_ROOT, "PATH": search, "TERM": "dumb"},  # Open MPI gives ranks a terminal
            deadline=DEADLINE,
            cwd=tmp_path,
        )
        # what a program prints beside its result, warnings for instance, a page leaves out
        got, wanted = comparable(done.stdout or done.stderr), comparable(expected)
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(wanted, got, options), f"$ {command}\n{got}\n-- not\n{wanted}"


def test_pictures_of_the_guide_are_what_the_commands_show(tmp_path: Path) -> None:
    """``python -m tests.support.pictures`` makes them again."""
    need_the_machine_of_the_pages(EXAMPLES / "DOCTOR.md")
    write_pictures(tmp_path)
    for name in PICTURES:
        assert f"]({name}.svg)" in (EXAMPLES / "DOCTOR.md").read_text(encoding="utf-8")
        shown, published = (
            folder.joinpath(f"{name}.svg").read_text(encoding="utf-8") for folder in (tmp_path, EXAMPLES)
        )
        # How long a path is decides where a line is folded.
        texts = [
            comparable(html.unescape("".join(re.findall(r">([^<>]+)</text>", svg))).replace("\N{NO-BREAK SPACE}", " "))
            for svg in (shown, published)
        ]
        words = [re.sub(r"\(?/path\)?", "", text).split() for text in texts]
        assert words[0] == words[1]
        assert len(published) < 20_000


# Commands between the lines: placeholders are filled in, and each is run.


PLACEHOLDERS = {
    "CODE": "no-device",
    "TEXT": "libcuda.so.1: cannot open shared object file",
    "PATH": ".venv",
    "HOST:PORT": "127.0.0.1:23456",
    "node1": "127.0.0.1",
    "node2": "127.0.0.1",
    "node3": "127.0.0.1",
    "/mnt/checkpoints": "checkpoints",
    "uvx ": "",
}


def inline_commands() -> list[str]:
    """Return the commands of this library in the text of the pages, each once. A name alone is no command."""
    found = [
        each for page in PAGES for each in re.findall(r"`([^`\n]*\bortgpu [^`\n]+)`", page.read_text(encoding="utf-8"))
    ]
    commands = [each for each in found if re.match(r"(uvx |mpirun -np? \d )?ortgpu [a-z]+", each)]
    whole = {each for each in commands if " " in each.partition("ortgpu ")[2] or each.startswith("mpirun")}
    filled = {
        functools.reduce(lambda command, pair: command.replace(*pair), PLACEHOLDERS.items(), each) for each in whole
    }
    return sorted(filled | {"ortgpu demo", "ortgpu doctor"})


def test_inline_commands_are_found() -> None:
    assert {"ortgpu check model.onnx", "ortgpu explain no-device", "mpirun -n 2 ortgpu preflight"} <= set(
        inline_commands()
    )


@pytest.mark.parametrize("command", inline_commands())
def test_command_in_the_text_of_a_page_is_no_wrong_usage(command: str, tmp_path: Path) -> None:
    if command.startswith("mpirun") and not any(launchers.why_not_here(name) is None for name in ("mpich", "openmpi")):
        pytest.skip("there is no mpirun")
    write_commands(tmp_path / "bin")
    for name in ("model.onnx", "other.onnx"):
        (tmp_path / name).write_bytes(onnx.parser.parse_model(MODEL).SerializeToString())
    (tmp_path / "app.py").write_text("print('started')\n", encoding="utf-8")
    (tmp_path / "log.txt").write_text("CUDA failure 100: no CUDA-capable device is detected\n", encoding="utf-8")
    (tmp_path / "checkpoints").mkdir()
    if "--python" in command:
        venv.create(tmp_path / ".venv", with_pip=False)
    search = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **launchers.AS_ROOT, **NO_GPU, "PATH": search}
    done = run_child(["/bin/sh", "-c", command], env=env, deadline=DEADLINE, cwd=tmp_path)
    assert done.returncode in (0, 1), done
    assert "Traceback" not in done.stderr
    assert done.stdout
