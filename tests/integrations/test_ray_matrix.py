"""The integration with Ray, with Ray: jobs on pretended GPUs, where sessions are on the CPU because that was allowed.

On demand: ``pytest -m matrix``. Ray has an environment of its own, made by doing what the error says that is raised
without it; ONNX Runtime and all else comes from the environment of the tests.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ortgpu.errors import catalogue
from tests.lab.environments import call, kept_environment, packages_of
from tests.lab.fixtures import Lab
from tests.lab.hosts import network_in
from tests.support.children import Child, child_environment, run_child
from tests.support.this_machine import site_folders

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# An environment is downloaded and unpacked in the setup of its first test.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 240  # seconds: a program takes ten to forty on two busy cores

ASK_FOR_ADVICE = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))  # hides what is named
try:
    exec(f"from ortgpu.integrations.ray import {sys.argv[1]}")
except ImportError as error:
    (fix,) = error.fixes
    print(fix)
"""

# Object store in MB, since the machine may be small; and nothing is sent home.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(200 * 2**20)}


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the environment that has Ray."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

    def fill(python: Path) -> None:
        call([str(python), "-m", "pip", "install", "--quiet", "--editable", str(ROOT)])
        call(["/bin/sh", "-c", call([str(python), "-c", ASK_FOR_ADVICE, "open_session"])])
        (packages_of(python) / "of_the_tests.pth").write_text("\n".join(map(str, site_folders())), encoding="utf-8")

    return kept_environment("ray", "\n".join([*extra["ray"], *map(str, site_folders())]), fill)


def run(python: Path, *arguments: str, env: dict[str, str] | None = None) -> Child:
    with tempfile.TemporaryDirectory(prefix="ray-") as logs:  # where Ray leaves them, and they are no use to anyone
        variables = child_environment({**QUIET, "RAY_TMPDIR": logs, **(env or {})}, python_path=())
        return run_child([str(python), *arguments], env=variables, deadline=DEADLINE)


def program(python: Path, name: str, arguments: str = "{}") -> dict[str, Any]:
    """What a function of ``tests/support/ray_programs.py`` reported."""
    child = run(python, str(ROOT / "tests" / "support" / "ray_programs.py"), name, arguments).ok()
    return dict(child.reports)


def error(outcome: dict[str, Any]) -> str:
    assert "type" in outcome, outcome
    return str(outcome["type"])


@pytest.fixture(scope="module")
def workers(python: Path) -> dict[str, Any]:
    return program(python, "workers")


@pytest.fixture(scope="module")
def data(python: Path) -> dict[str, Any]:
    return program(python, "data", '{"allow_cpu": true}')


@pytest.fixture(scope="module")
def serving(python: Path) -> dict[str, Any]:
    return program(python, "serving", '{"allow_cpu": true}')


# The extra


@pytest.mark.parametrize(
    ("name", "hidden"), [("open_session", "ray"), ("RayGPUSession", "pandas"), ("GPUDeployment", "starlette")]
)
def test_what_is_said_without_ray_installed_it(python: Path, name: str, hidden: str) -> None:
    said = run(python, "-c", ASK_FOR_ADVICE, name, hidden)
    assert re.fullmatch(rf"{re.escape(str(python))} -m pip install .*\bray\b.*\n", said.stdout)
    assert run(python, "-c", ASK_FOR_ADVICE, name).stdout == "", "and with all of Ray there is nothing to say"


def test_the_installed_release_is_one_that_the_extra_allows(python: Path) -> None:
    version = run(python, "-c", "import ray; print(ray.__version__)").stdout
    assert re.match(r"2\.(\d+)\.", version)


# Workers


def test_a_gpu_that_ray_assigned_is_the_one_that_is_opened(workers: dict[str, Any]) -> None:
    assert error(workers["one"]) == "DriverNotFoundError"
    visible, device = workers["one, cpu allowed"]["returned"]
    assert visible in ("0", "1")
    assert device == "cpu"


def test_a_worker_without_a_gpu_is_refused(workers: dict[str, Any]) -> None:
    """It sees all of them: its session would be on GPU 0."""
    assert error(workers["none"]) == "NoDeviceError"
    assert "Ray assigned no GPU" in workers["none"]["summary"]
    assert any("CUDA shows it every GPU of the node" in fact for fact in workers["none"]["evidence"])
    assert workers["none, cpu allowed"]["returned"] == [None, "cpu"]


def test_what_it_is_told_to_ask_for_is_what_helps(workers: dict[str, Any]) -> None:
    (fix,) = workers["none"]["fixes"]
    assert re.findall(r"num_gpus\W+(\d)", fix) == ["1", "1"]
    assert error(workers["one"]) != "NoDeviceError", "the same with num_gpus=1"


def test_several_gpus_for_one_session_need_a_choice(workers: dict[str, Any]) -> None:
    assert error(workers["two"]) == "RankDeviceError", "allow_cpu is about a GPU that cannot be had"
    assert workers["two, device named"]["returned"] == ["0,1", "cpu"]


def test_ray_kept_from_setting_the_variable_is_refused(workers: dict[str, Any]) -> None:
    assert error(workers["variable kept"]) == "RankDeviceError"
    assert "start Ray without RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in workers["variable kept"]["fixes"]


def test_a_probe_raises_what_a_worker_would_run_into(workers: dict[str, Any]) -> None:
    assert error(workers["probe"]) == "DriverNotFoundError"
    assert workers["probe, cpu allowed"]["returned"] == "cpu"


def test_a_probe_does_not_wait_for_a_gpu_for_ever(workers: dict[str, Any]) -> None:
    assert error(workers["probe, too many"]) == "NoDeviceError"
    assert "GPUs of the cluster: 2" in workers["probe, too many"]["evidence"]


@pytest.mark.parametrize("code", catalogue())
def test_every_error_arrives_at_the_driver_whole(workers: dict[str, Any], code: str) -> None:
    assert workers["errors"][code] == (["cause"] if code == "worker-lost" else []), "cause is Ray's own attribute"


# Data


def test_a_dataset_is_computed_by_an_actor_on_each_gpu(data: dict[str, Any]) -> None:
    assert data["two actors"] == {
        "returned": {
            "rows": True,
            "columns": ["gpu", "id", "pid", "y"],
            "right": True,
            "gpus": ["0 cpu", "1 cpu"],
            "processes": 2,
        }
    }


def test_actors_may_share_a_gpu(data: dict[str, Any]) -> None:
    shared = data["half a gpu each"]["returned"]
    assert (shared["rows"], shared["right"], shared["processes"]) == (True, True, 3)
    assert shared["gpus"] == ["0 cpu", "1 cpu"]


def test_a_dataset_raises_what_its_actors_ran_into(data: dict[str, Any]) -> None:
    assert error(data["no gpu"]) == "NoDeviceError"
    assert error(data["without a driver"]) == "DriverNotFoundError"
    assert "libcuda.so.1" in data["without a driver"]["summary"]


# Serve


def test_replicas_on_each_gpu_answer_right(serving: dict[str, Any]) -> None:
    assert serving["right"] is True
    assert serving["gpus"] == ["0 cpu", "1 cpu"]


def test_requests_are_joined(serving: dict[str, Any]) -> None:
    assert serving["rows"] is True
    assert serving["fewer runs than requests"] is True


def test_wrong_requests_get_their_own_error(serving: dict[str, Any]) -> None:
    assert serving["wrong shape"]["other"] == "RayTaskError(InvalidArgument)"
    assert serving["no mapping"]["other"] == "RayTaskError(TypeError)"


def test_a_replica_that_lost_its_session_says_so_and_is_replaced(serving: dict[str, Any]) -> None:
    assert error(serving["session lost"]) == "ExecutionError"
    assert "closed" in serving["session lost"]["summary"]
    assert serving["replaced by a new process"] is True


def test_a_deployment_without_its_session_does_not_start(serving: dict[str, Any]) -> None:
    assert serving["start"]["other"] == "RuntimeError"
    assert "DriverNotFoundError" in serving["status after start"][0]
    assert serving["start without a gpu"]["other"] == "RuntimeError"
    assert "Ray assigned no GPU to this worker" in serving["status after start without a gpu"][0]


def test_and_a_probe_tells_why(serving: dict[str, Any]) -> None:
    assert error(serving["probe"]) == "DriverNotFoundError"


# Preflight


def test_a_preflight_raises_what_its_ranks_ran_into(workers: dict[str, Any]) -> None:
    assert error(workers["preflight"]) == "DriverNotFoundError"
    assert any("ranks 0, 1" in fact for fact in workers["preflight"]["evidence"])


def test_a_preflight_does_not_wait_for_gpus_for_ever(workers: dict[str, Any]) -> None:
    assert error(workers["preflight, too many"]) == "NoDeviceError"
    assert "Ray had not 3 GPUs" in workers["preflight, too many"]["summary"]


def test_a_preflight_over_two_nodes(python: Path, lab: Lab) -> None:
    """With the real nccl4py; the driver, the CUDA runtime and NCCL below it are the lab's."""
    path = os.pathsep.join([str(ROOT), str(packages_of(python))])
    arguments = [str(ROOT / "tests" / "support" / "ray_programs.py"), "nodes", "{}"]
    machine = lab.machine_with_nccl(2)
    done = machine.run(argv=arguments, env={**QUIET, "PYTHONPATH": path}, timeout=DEADLINE).ok()
    assert_preflight_of_two_nodes(done.reports)


def test_a_preflight_over_two_hosts(python: Path, lab: Lab) -> None:
    """The same, with a network between the nodes."""
    path = os.pathsep.join([str(ROOT), str(packages_of(python))])
    machine = lab.machine_with_nccl(2)
    interpreter = str(machine.overlay.python)
    # Not below pytest's folder: the paths of sockets have a limit of 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, network_in(Path(folder, "net")) as network:
        commands = []
        for number, where in enumerate(
            (["--head", "--port=6379", "--include-dashboard=false"], ["--address=node1:6379"])
        ):
            host = network.add(f"node{number + 1}", {"CUDA_VISIBLE_DEVICES": str(number)})
            resources = [f"--node-ip-address={host.address}", "--num-cpus=1", "--num-gpus=1"]
            commands.append(host.command([interpreter, "-m", "ray.scripts.scripts", "start", *where, *resources]))
        program = [str(ROOT / "tests" / "support" / "ray_programs.py"), "nodes_at", '{"address": "10.77.0.1:6379"}']
        code = (
            "import subprocess\n"
            f"for command in {commands!r}:\n"
            "    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)\n"
            f"subprocess.run({network.hosts[0].command([interpreter, *program])!r}, check=True)\n"
        )
        done = machine.run(code, env={**QUIET, "PYTHONPATH": path}, timeout=DEADLINE).ok()
    found = assert_preflight_of_two_nodes(done.reports)
    assert sorted(facts["host"] for facts in found["ranks"]) == ["node1", "node2"]


def assert_preflight_of_two_nodes(seen: Mapping[str, Any]) -> dict[str, Any]:
    """What it returned."""
    assert seen["nodes"] == 2
    assert "returned" in seen["preflight"], seen["preflight"]
    found = seen["preflight"]["returned"]
    assert (found["rank"]["world_size"], found["rank"]["local_world_size"]) == (2, 1)
    assert sorted(facts["uuid"][-1] for facts in found["ranks"]) == ["0", "1"]
    assert [result["call"]["count"] for result in found["collectives"]] == [1000, 10]
    assert seen["groups"] == ["REMOVED"]
    return dict(found)


# Examples


EXAMPLES = [str(ROOT / "examples" / name) for name in ("ray_data.py", "ray_serve.py")]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # Ray believes this variable too


@pytest.mark.parametrize("example", EXAMPLES, ids=os.path.basename)
def test_example(python: Path, example: str) -> None:
    done = run(python, example, "--allow-cpu", env=NO_GPU).ok()
    assert "[0.0, 0.0, 1.0, 2.0]" in done.stdout


def test_examples_without_a_gpu(python: Path) -> None:
    with ThreadPoolExecutor(len(EXAMPLES)) as together:  # most of the time each waits for a GPU
        for done in together.map(lambda example: run(python, example, env=NO_GPU), EXAMPLES):
            assert done.returncode == 1, done.output
            assert "No GPU can be used (no-device): Ray ran no task with num_gpus=1" in done.stdout


def test_no_cluster_is_left_behind(python: Path) -> None:
    """Of the programs above, wherever they ended."""
    running = [Path(entry, "cmdline") for entry in map(str, Path("/proc").glob("[0-9]*"))]
    commands = []
    for path in running:
        try:
            commands.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    assert [command for command in commands if str(packages_of(python)) in command and os.sep + "ray" in command] == []
