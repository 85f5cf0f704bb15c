"""What tests of Ray run: each function is a driver of its own, in a child process, and reports what it saw.

Run by an interpreter that has Ray. GPUs are pretended where there is none: Ray believes ``num_gpus``, and shows its
workers what it believes in CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import ray
from ray import serve
from ray.util.placement_group import placement_group_table

from ortgpu.distributed import Collective
from ortgpu.environment.gpu.cuda import initialise
from ortgpu.environment.gpu.driver import read_nvml
from ortgpu.errors import GPUError, PoisonedContextError, catalogue
from ortgpu.integrations.ray import GPUDeployment, RayGPUSession, ServedGPUSession, open_session, preflight, probe
from tests.support.children import report

MODEL: bytes = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }'
).SerializeToString()


@contextlib.contextmanager
def cluster(num_gpus: int | None = None) -> Iterator[None]:
    """One node, with little memory and no dashboard. ``num_gpus`` None: those that the node has."""
    # Not below pytest's folder: the paths of sockets have a limit of 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=6,  # counted, not used: an actor of Ray Data takes one, and so does each task that reads
            num_gpus=num_gpus,
            object_store_memory=200 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """What a program's `except ortgpu.GPUError` would see of it."""
    try:
        return {"returned": action()}
    except GPUError as error:
        kind = next(cls for cls in type(error).__mro__ if cls.__module__ == "ortgpu.errors")
        return {
            "type": kind.__name__,
            "summary": error.summary,
            "evidence": list(error.evidence),
            "fixes": list(error.fixes),
            "text": str(getattr(error, "cause", error)),
        }
    except Exception as error:  # noqa: BLE001 - which is what the test asks about
        return {"other": type(error).__name__, "text": str(error)}


def items(count: int) -> Any:
    return np.random.default_rng(7).standard_normal((count, 4)).astype(np.float32)


def plain(x: Any) -> Any:
    """What ONNX Runtime itself makes of it, on the CPU."""
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


class Located(RayGPUSession):
    """Beside the results, where they were computed."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        rows = super().__call__(batch)
        count = len(rows["y"])
        gpu = f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {self.session.device.uuid or self.session.device}"
        return {**rows, "gpu": np.full(count, gpu), "pid": np.full(count, os.getpid())}


def infer(x: Any, actors: int = 2, **options: Any) -> list[dict[str, Any]]:
    settings = options.pop("settings", {})
    rows = ray.data.from_items([{"id": number, "x": row} for number, row in enumerate(x)], override_num_blocks=12)
    located: list[dict[str, Any]] = rows.map_batches(
        Located,
        fn_constructor_args=(MODEL,),
        fn_constructor_kwargs=settings,
        compute=ray.data.ActorPoolStrategy(size=actors),
        batch_size=8,
        **options,
    ).take_all()
    return located


def judged(x: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether every row is there once and right, and where they were computed."""
    expected = plain(x)
    return {
        "rows": sorted(row["id"] for row in rows) == list(range(len(x))),
        "columns": sorted(rows[0]),
        "right": all(np.array_equal(row["y"], expected[row["id"]]) for row in rows),
        "gpus": sorted({str(row["gpu"]) for row in rows}),
        "processes": len({int(row["pid"]) for row in rows}),
    }


def data(allow_cpu: bool) -> None:
    """A dataset through two actors, through actors that share a GPU, and what stops one.

    Those that are stopped come last: their actors keep their GPUs for a while.
    """
    settings = {"allow_cpu": allow_cpu}
    with cluster(num_gpus=2 if allow_cpu else None):
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.wait_for_min_actors_s = 90  # else the first actor may be done before the next is there
        x = items(256)
        report("two actors", outcome(lambda: judged(x, infer(x, num_gpus=1, settings=settings))))
        half = outcome(lambda: judged(x, infer(x, actors=3, num_gpus=0.5, settings=settings)))
        report("half a gpu each", half)
        report("no gpu", outcome(lambda: infer(x, actors=1)))
        if allow_cpu:
            report("without a driver", outcome(lambda: infer(x, actors=1, num_gpus=1)))


class Worker:
    """An actor of a program's own, which opens its session in a method."""

    def open(self, **settings: Any) -> tuple[str | None, str]:
        self.session = open_session(MODEL, **settings)
        return os.environ.get("CUDA_VISIBLE_DEVICES"), str(self.session.device.uuid or self.session.device)

    def open_after(self, others: str) -> None:
        """As where a worker has used CUDA for one task, and gets another one with another GPU."""
        own, os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"], others
        assert initialise().code == 0
        os.environ["CUDA_VISIBLE_DEVICES"] = own
        open_session(MODEL)


def started(**options: Any) -> Any:
    return ray.remote(num_cpus=0, **options)(Worker).remote()


def opened(actor: Any, **settings: Any) -> dict[str, Any]:
    """What came of a session in an actor, which is ended."""
    found = outcome(lambda: ray.get(actor.open.remote(**settings)))
    ray.kill(actor)
    return found


def fail(code: str) -> None:
    cls = catalogue()[code]
    fields: dict[str, Any] = {name: (name,) for name in cls.fields}
    raise cls("it failed", evidence=["a fact"], fixes=["a fix"], **fields)


def workers() -> None:
    """Actors and tasks with every number of pretended GPUs, and every error on its way to the driver."""
    kept = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    options = onnxruntime.SessionOptions
    with cluster(num_gpus=2):
        report("one", opened(started(num_gpus=1)))
        report("one, cpu allowed", opened(started(num_gpus=1), allow_cpu=True, sess_options=options))
        report("none", opened(started()))
        report("none, cpu allowed", opened(started(), allow_cpu=True))
        report("two", opened(started(num_gpus=2), allow_cpu=True))
        report("two, device named", opened(started(num_gpus=2), allow_cpu=True, device="cuda:1"))
        report("variable kept", opened(started(num_gpus=1, runtime_env=kept), allow_cpu=True))
        report("probe", outcome(lambda: probe(MODEL)))
        report("probe, cpu allowed", outcome(lambda: str(probe(MODEL, allow_cpu=True))))
        report("probe, too many", outcome(lambda: probe(MODEL, num_gpus=3, timeout=2)))
        report("preflight", outcome(lambda: preflight(timeout=60).as_dict()))
        report("preflight, too many", outcome(lambda: preflight(3, timeout=2)))
        report("errors", {code: crossed(code) for code in catalogue()})


def crossed(code: str) -> list[str]:
    """What of an error did not arrive at the driver as it was."""
    cls = catalogue()[code]
    try:
        ray.get(ray.remote(fail).remote(code))
    except GPUError as error:
        if not isinstance(error, cls):
            return [type(error).__name__]
        seen = {**error.details(), "summary": error.summary, "evidence": error.evidence, "fixes": error.fixes}
        sent: dict[str, object] = {name: (name,) for name in cls.fields}
        sent |= {"summary": "it failed", "evidence": ("a fact",), "fixes": ("a fix",)}
        return [name for name in sent if seen[name] != sent[name]]
    except Exception as error:  # noqa: BLE001 - is the finding
        return [type(error).__name__]
    return ["nothing was raised"]


class Counting(ServedGPUSession):
    """Beside the results, where they were computed; and what was run together."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.runs: list[int] = []
        run = self.session.run

        def counted(names: Any, inputs: Any, options: Any = None) -> Any:
            self.runs.append(len(inputs["x"]))
            return run(names, inputs, options)

        self.session.run = counted  # type: ignore[method-assign, assignment]  # on purpose

    async def __call__(self, inputs: Any) -> Any:
        gpu = f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {self.session.device.uuid or self.session.device}"
        return (await super().__call__(inputs))["y"], gpu, os.getpid()

    def runs_so_far(self) -> tuple[int, list[int]]:
        return os.getpid(), self.runs

    def lose_session(self) -> int:
        """By a CUDA error after which the process has no GPU any more; on the CPU, where there is none, by closing."""
        if self.session.device.is_gpu:
            binding = self.session.io_binding()
            binding.bind_input("x", "cuda", 0, np.float32, (1, 4), 0x7000)  # no such address on any GPU
            binding.bind_output("y", "cuda")
            with contextlib.suppress(PoisonedContextError):
                self.session.run_with_iobinding(binding)
        else:
            self.session.close()
        return os.getpid()


def placed() -> None:
    """Two actors one after the other: which GPU each says it is on, and which one NVML saw fill up meanwhile."""
    with cluster(num_gpus=2):  # no more, so that the last actor has the GPU that one before it had
        actors = []
        for number in range(2):
            before = free_memory()
            actors.append(started(num_gpus=1))
            report(f"actor {number}", outcome(lambda: ray.get(actors[-1].open.remote())))
            after = free_memory()
            report(f"filled by actor {number}", [uuid for uuid in before if before[uuid] - after[uuid] > 100 << 20])
        visible, _ = ray.get(actors[0].open.remote())
        ray.kill(actors.pop())
        late = started(num_gpus=1)
        report("another gpu before", outcome(lambda: ray.get(late.open_after.remote(visible))))


def free_memory() -> dict[str, int]:
    return {gpu.uuid: gpu.memory_free or 0 for gpu in read_nvml().gpus if gpu.uuid is not None}


def nodes() -> None:
    """A preflight over two nodes: each a raylet of its own on this host, which has one of its two GPUs."""
    from ray.cluster_utils import Cluster

    def node(gpu: int) -> dict[str, Any]:
        shown = {"CUDA_VISIBLE_DEVICES": str(gpu)}
        return {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 * 2**20, "env_vars": shown}

    both = Cluster(initialize_head=True, head_node_args={**node(0), "include_dashboard": False})
    try:
        both.add_node(**node(1))
        nodes_at(both.address)
    finally:
        both.shutdown()


def nodes_at(address: str) -> None:
    """A preflight over the nodes of a cluster that is there."""
    calls = [Collective("all_reduce", "float32", 1000), Collective("all_gather", "bfloat16", 10)]
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        report("nodes", len(ray.nodes()))
        report("preflight", outcome(lambda: preflight(timeout=90, calls=calls).as_dict()))
        report("groups", [group["state"] for group in placement_group_table().values()])
    finally:
        ray.shutdown()


def ranks() -> None:
    """A preflight between all GPUs of this node."""
    with cluster():
        report("uuids", outcome(lambda: [facts.uuid for facts in preflight().ranks]))


def serving(allow_cpu: bool) -> None:
    """Two replicas; requests that are joined, that are wrong, and that meet a session which is no more."""
    with cluster(num_gpus=2 if allow_cpu else None):
        replica = serve.deployment(
            Counting, ray_actor_options={"num_gpus": 1}, max_ongoing_requests=100, health_check_period_s=1
        )
        application = replica.options(num_replicas=2).bind(
            MODEL, allow_cpu=allow_cpu, max_batch_size=4, batch_wait_timeout_s=0.05
        )
        try:
            handle = serve.run(application, route_prefix=None)
            serve_requests(handle)
            if allow_cpu:
                serve.delete("default")
                refuse_at_the_start()
        finally:
            serve.shutdown()


def serve_requests(handle: Any) -> None:
    sent = [items(9)[start : start + 1 + start % 3] for start in range(6)] * 10
    answers = [response.result(timeout_s=60) for response in [handle.remote({"x": x}) for x in sent]]
    report("right", all(np.array_equal(y, plain(x)) for x, (y, _, _) in zip(sent, answers, strict=True)))
    report("gpus", sorted({gpu for _, gpu, _ in answers}))
    replicas: dict[int, list[int]] = {}
    while len(replicas) < 2:
        pid, runs = handle.runs_so_far.remote().result(timeout_s=60)
        replicas[pid] = runs
    report("rows", sum(map(sum, replicas.values())) == sum(map(len, sent)))
    report("fewer runs than requests", sum(map(len, replicas.values())) < len(sent))
    report("wrong shape", outcome(lambda: handle.remote({"x": items(2)[:, :3]}).result(timeout_s=60)))
    report("no mapping", outcome(lambda: handle.remote(7).result(timeout_s=60)))
    lost = handle.lose_session.remote().result(timeout_s=60)
    report("session lost", outcome(lambda: until_lost(handle)))
    seen: set[int] = set(replicas)
    pause = threading.Event()
    while lost in seen or len(seen) < 2:  # the parent's deadline ends a loop that Serve does not
        seen = {pid for _ in range(10) if (pid := answering(handle)) is not None}
        pause.wait(0.2)
    report("replaced by a new process", not seen <= set(replicas))


def until_lost(handle: Any) -> None:
    while True:
        handle.remote({"x": items(1)}).result(timeout_s=60)


def answering(handle: Any) -> int | None:
    try:
        return int(handle.remote({"x": items(1)}).result(timeout_s=60)[2])
    except GPUError:
        return os.getpid()  # of no replica


def refuse_at_the_start() -> None:
    """A deployment whose replicas cannot have their session, and the documented way to tell why."""
    deployment = GPUDeployment.options(max_constructor_retry_count=1)
    try_to_start("start", deployment)
    try_to_start("start without a gpu", deployment.options(ray_actor_options={"num_gpus": 0}))
    report("probe", outcome(lambda: probe(MODEL)))


def try_to_start(name: str, deployment: Any) -> None:
    report(name, outcome(lambda: serve.run(deployment.bind(MODEL), route_prefix=None)))
    (status,) = serve.status().applications.values()
    report(f"status after {name}", [deployed.message for deployed in status.deployments.values()])


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
