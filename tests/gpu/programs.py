"""What the children of the GPU tests do: one function each, started as ``programs.py NAME '{"argument": value}'``.

A program reports facts, as soon as it has them; the tests judge. Everything heavy is imported inside the functions,
in the order that the program is about.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from tests.support.children import report
from tests.support.this_machine import mapped_files

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
CUDA_LIBRARY = re.compile(r"(lib(?:cudart|cublasLt|cublas|curand|cufft|nvrtc|nvJitLink|cudnn\w*))\.so")


# Facts


def describe(error: BaseException) -> dict[str, Any]:
    details = getattr(error, "details", None)
    return {
        "type": type(error).__name__,
        "bases": [cls.__name__ for cls in type(error).__mro__],
        "module": type(error).__module__,
        "text": str(error),
        "fields": details() if callable(details) else {},
    }


def attempt(name: str, action: Callable[[], object]) -> None:
    """Report what `action` returned, or what it raised."""
    try:
        outcome: dict[str, Any] = {"returned": action()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the test decides
        outcome = {"error": describe(error)}
    report(name, outcome)


def device_facts(session: Any) -> dict[str, Any]:
    device = session.device
    names = ("ordinal", "uuid", "name", "compute_capability", "total_memory", "driver_version", "is_gpu")
    return {
        **{name: getattr(device, name) for name in names},
        "providers": session.get_providers(),
        "options": session.get_provider_options().get(CUDA, {}),
    }


def mapped_cuda_libraries() -> dict[str, list[str]]:
    """Paths by library, without version: two paths under one name are two copies in one process."""
    found: dict[str, list[str]] = {}
    for path in mapped_files():
        match = CUDA_LIBRARY.match(path.rpartition("/")[2])
        if match:
            found.setdefault(match[1], []).append(path)
    return found


def free_memory(uuid: str | None) -> int | None:
    """Free bytes of the GPU, through NVML; where that is missing, through the CUDA runtime that this process has."""
    from ortgpu.environment.gpu import driver

    memory = driver.read_gpu_memory(uuid) if uuid else None
    if memory is not None:
        return int(memory[0])
    import ctypes

    for path in mapped_cuda_libraries().get("libcudart", []):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if ctypes.CDLL(path).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0:
            return free.value
    return None


def random_feed(session: Any, batch: int) -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(batch)
    feed = {}
    for entry in session.get_inputs():
        shape = [size if isinstance(size, int) else batch for size in entry.shape]
        feed[entry.name] = random.random(shape, dtype=np.float32)
    return feed


def relative_error(found: list[Any], expected: list[Any]) -> float:
    """Largest difference, in units of the largest expected value; infinite for other shapes or for no numbers."""
    import numpy as np

    worst = 0.0
    for ours, reference in zip(found, expected, strict=True):
        if ours.shape != reference.shape or not np.isfinite(ours).all():
            return float("inf")
        worst = max(worst, float(np.abs(ours - reference).max() / np.abs(reference).max()))
    return worst


def cpu_reference(model: str | bytes) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(model, providers=[CPU])


def warning_texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [f"{entry.category.__name__}: {entry.message} ({entry.filename}:{entry.lineno})" for entry in caught]


# Programs


def run_model(model: str, batches: list[int], uuids: list[str]) -> None:
    """Open, look where it is, and compare with the CPU provider: with TF32, which is the default, and without."""
    from ortgpu.environment.gpu import driver

    before = {uuid: free_memory(uuid) for uuid in uuids}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from ortgpu import GPUSession

        session = GPUSession(model)
        feeds = {batch: random_feed(session, batch) for batch in batches}
        results = {batch: session.run(None, feed) for batch, feed in feeds.items()}
    report("warnings", warning_texts(caught))
    report("device", device_facts(session))
    nodes = [(node.name, node.op_type, node.provider, node.kind) for node in session.placement.nodes]
    report("placement", {"nodes": nodes, "by_provider": dict(session.placement.by_provider)})
    uuid = session.device.uuid
    holders = driver.processes_on(uuid) if uuid else {}
    held = {"pid": os.getpid(), "pids": sorted(holders), "bytes": holders.get(os.getpid())}
    report("memory", {**held, "before": before.get(uuid or ""), "after": free_memory(uuid)})
    report("libraries", mapped_cuda_libraries())
    reference = cpu_reference(model)
    expected = {batch: reference.run(None, feed) for batch, feed in feeds.items()}
    report("tf32", {str(batch): relative_error(results[batch], expected[batch]) for batch in batches})
    session.close()
    with GPUSession(model, providers=[(CUDA, {"use_tf32": "0"})]) as exact:
        results = {batch: exact.run(None, feed) for batch, feed in feeds.items()}
    report("fp32", {str(batch): relative_error(results[batch], expected[batch]) for batch in batches})


def variation(model: str, before: str | None = None, after: str | None = None) -> None:
    """Open a model after and before other users of the GPU have come into this process."""
    if before:
        try:
            USERS[before]()
        except Exception as error:  # noqa: BLE001 - that library does not work here at all
            report("unusable", f"{type(error).__name__}: {error}")
            return
    report("libraries before", mapped_cuda_libraries())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from ortgpu import GPUSession

        session = GPUSession(model)
        feed = random_feed(session, 2)
        result = session.run(None, feed)
    report("warnings", warning_texts(caught))
    report("device", device_facts(session))
    report("libraries", mapped_cuda_libraries())
    report("error against the CPU", relative_error(result, cpu_reference(model).run(None, feed)))
    if after:
        USERS[after]()
        report("after", relative_error(session.run(None, feed), result))
        report("libraries after", mapped_cuda_libraries())
    session.close()
    report("closed", True)
    look_around(model)


def look_around(model: str) -> None:
    """What a diagnosis makes of this environment, and the doctor's exit status where its packages are installed."""
    import subprocess

    import ortgpu

    diagnosis = ortgpu.diagnose(model, probe=True, timeout=60)
    report("problems", [str(problem) for problem in diagnosis.problems])
    report("probe", [[step.name, step.ok, step.detail] for step in diagnosis.probe.steps] if diagnosis.probe else [])
    flags = ["-S"] if sys.flags.no_site else []
    command = [sys.executable, *flags, "-m", "ortgpu", "doctor", "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    absent = "No module named 'click'" in done.stderr or "No module named 'rich'" in done.stderr
    report(
        "doctor", None if absent else {"status": done.returncode, "output": done.stdout[-3000:] + done.stderr[-1000:]}
    )


def use_torch() -> None:
    """A product and a convolution: cuBLAS and cuDNN are loaded and initialised."""
    torch: Any = importlib.import_module("torch")  # not a dependency: absent where types are checked
    ones = torch.ones(1, 3, 8, 8, device="cuda")
    convolved = torch.nn.functional.conv2d(ones, torch.ones(4, 3, 3, 3, device="cuda")).sum().item()
    multiplied = (ones[0, 0] @ ones[0, 0]).sum().item()
    if (convolved, multiplied) != (4 * 36 * 27, 8 * 8 * 8):
        raise RuntimeError(f"torch computed {convolved} and {multiplied}")


def use_cupy() -> None:
    cupy: Any = importlib.import_module("cupy")
    if int((cupy.arange(8) * 2).sum()) != 56:
        raise RuntimeError("cupy computed something else")


def import_onnxruntime() -> None:
    import onnxruntime

    report("onnxruntime", onnxruntime.__version__)


USERS: dict[str, Callable[[], None]] = {"torch": use_torch, "cupy": use_cupy, "onnxruntime": import_onnxruntime}


# Without cuDNN


def without_cudnn(conv: str, mlp: str) -> None:
    from ortgpu import GPUSession

    def opened(model: str) -> dict[str, Any]:
        with GPUSession(model) as session:
            feed = random_feed(session, 2)
            error = relative_error(session.run(None, feed), cpu_reference(model).run(None, feed))
            return {"error against the CPU": error, **device_facts(session)}

    attempt("mlp", lambda: opened(mlp))
    attempt("conv", lambda: opened(conv))
    attempt("mlp again", lambda: opened(mlp))
    report("libraries", mapped_cuda_libraries())

    import onnxruntime

    def open_plain() -> list[str]:
        plain.append(onnxruntime.InferenceSession(conv, providers=[CUDA, CPU], enable_fallback=0))
        return list(plain[0].get_providers())

    plain: list[Any] = []
    attempt("plain opens", open_plain)
    if plain:
        plain[0].disable_fallback()
        attempt("plain runs", lambda: len(plain[0].run(None, random_feed(plain[0], 1))))


PROGRAMS: dict[str, Callable[..., None]] = {
    "run_model": run_model,
    "variation": variation,
    "without_cudnn": without_cudnn,
}

if __name__ == "__main__":
    from tests.gpu import (
        budgets,
        graph_buffers,
        handles,
        layouts,
        lifetime,
        neighbours,
        pooling,
        refused,
        requesting,
        running,
        shaping,
        staging,
        streams,
        throughput,
    )

    others = (
        budgets, graph_buffers, handles, layouts, lifetime, neighbours, pooling, refused, requesting, running, shaping,
        staging, streams, throughput,
    )  # fmt: skip
    try:
        programs = dict(PROGRAMS)
        for module in others:
            programs.update(module.PROGRAMS)
        programs[sys.argv[1]](**json.loads(sys.argv[2]))
    except BaseException:
        report("error", traceback.format_exc())
        raise
