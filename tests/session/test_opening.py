"""The opening of a session: what ONNX Runtime's constructor gets, which failure stops it where, and what it costs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.parser
import onnxruntime
import pytest

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.environment.libraries.wheel import Architecture
from ortgpu.errors import DriverNotFoundError, GPUError, PoisonedContextError, ProviderRequestError
from ortgpu.model.outline import GraphOutline
from ortgpu.provider.placement import PlacedNode, Placement
from ortgpu.provider.requests import ProviderList, parse
from ortgpu.provider.runtime import Runtime
from ortgpu.provider.settings import CAPTURE, DIMENSIONS, THREADS
from ortgpu.session import opening as module
from ortgpu.session.chosen import NO_HANDLES, ON_FEW_THREADS
from ortgpu.session.plan import Plan, cpu_plan
from ortgpu.session.request import SessionRequest
from ortgpu.session.undiagnosed import Diagnosed, UndiagnosedError
from tests.lab.fixtures import Lab
from tests.lab.installed import CUDA as CUDA_MAJOR
from tests.lab.stubs import NVML, Cuda
from tests.support.children import child_environment, run_python
from tests.support.made_facts import AVAILABLE, SEEN_HEALTHY
from tests.support.made_sessions import NEG
from tests.support.releases import TOO_OLD

# Functions entered by a failed open until its exception, comprehensions and class bodies counted. Where there is a
# driver, the provider is opened and the GPUs are listed, too.
MOST_FUNCTIONS = {
    "DriverNotFoundError": 320,
    "NoDeviceError": 350,
    "DriverUnusableError": 350,
    "DriverTooOldError": 390,  # Its fix is a command of the installer of this environment.
}

# Counts of what an opening costs, by an audit hook and a profiler in all threads. Only calls of ortgpu count.
COUNTED = "session.opening.counted"


def save_model(path: Path, reshapes: int) -> str:
    """Save a chain of reshapes to computed shapes. Only the form of its last node says if that needs cuDNN."""
    nodes, x = "", "x"
    for number in range(reshapes):
        nodes += f"s{number} = Shape ({x}) g{number} = Gather (s{number}, zero) "
        nodes += f"c{number} = Concat <axis = 0> (g{number}, rest) y{number} = Reshape ({x}, c{number}) "
        x = f"y{number}"
    constants = "<int64[1] zero = {0}, int64[1] rest = {-1}>"
    text = f"g (float[n, 4] x) => (int64[1, m] y) {constants} {{ {nodes} y = ArgMax <axis = -1> ({x}) }}"
    path.write_bytes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}').SerializeToString())
    return str(path)


@pytest.mark.parametrize("reshapes", [1, 200])
def test_a_session_opens_its_model_once(lab: Lab, provider_library: str, tmp_path: Path, reshapes: int) -> None:
    """Also where the outline stops at first, since the model is large, and the placement asks for the rest of it."""
    machine = lab.machine_that_places(provider_library)
    outcome, openings, _ = machine.run_program(COUNTED, save_model(tmp_path / "model.onnx", reshapes)).ok().json
    assert (outcome, openings) == ("opened", 1)


@pytest.mark.parametrize("reshapes", [1, 200])
def test_a_session_that_does_not_open_opens_its_model_once(lab: Lab, tmp_path: Path, reshapes: int) -> None:
    path = save_model(tmp_path / "model.onnx", reshapes)
    outcome, openings, _ = lab.machine().run_program(COUNTED, path).ok().json
    assert (outcome, openings) == ("DriverNotFoundError", 1)


@pytest.mark.parametrize(
    "parts",
    [
        {"cuda": Cuda(), "nvml": NVML(gpus=())},
        {"cuda": Cuda(init=100), "nvml": NVML()},
        {"cuda": Cuda(init=999), "nvml": NVML()},
        {"cuda": Cuda(version=TOO_OLD[CUDA_MAJOR][0]), "nvml": NVML()},
    ],
    ids=["no GPU", "no GPU of those that NVML sees", "an unusable driver", "an old driver"],
)
def test_a_driver_that_fails_is_explained_by_few_functions(lab: Lab, tmp_path: Path, parts: dict[str, Any]) -> None:
    path = save_model(tmp_path / "model.onnx", 1)
    outcome, _, functions = lab.machine(**parts).run_program(COUNTED, path).ok().json
    assert functions <= MOST_FUNCTIONS[outcome]


def test_a_session_without_a_gpu_opens_its_model_once(tmp_path: Path) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    outcome, openings, functions = run_python(COUNTED, save_model(tmp_path / "model.onnx", 1), env=env).ok().json
    assert openings == 1
    assert functions <= MOST_FUNCTIONS[outcome]


opening: Any = module  # so that a test may stand in for whatever it calls

# What the constructor gets

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
GPUS = (
    CudaDevice(0, "GPU-0", "NVIDIA H200", (9, 0), 141 << 30, 0),
    CudaDevice(1, "GPU-1", "NVIDIA L4", (8, 9), 24 << 30, 0),
)
DRIVER = CudaState(0, GPUS, 1)
MODULE: Any = SimpleNamespace(get_available_providers=lambda: list(AVAILABLE), __version__="1.31.1")
RUNTIME = Runtime(SEEN_HEALTHY.environment.packages, MODULE, None, SEEN_HEALTHY.observed.preload)
ON_GPU = Placement((PlacedNode("n", "Neg", "", CUDA, "compute"),))
PLACED_ON_CPU = Placement((PlacedNode("n", "Unique", "", CPU, "compute"),))


class Session:
    """A session under construction."""

    def __init__(self) -> None:
        self._sess: Any = None
        self._stream: Any = None


class Constructor:
    """ONNX Runtime's constructor: it notes its arguments, and raises what a test gives it."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, model: Any, options: Any, **named: Any) -> None:
        self.calls.append({"model": model, "options": options, **named})
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "ORTGPU_ALLOW_CPU", "ORTGPU_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(opening, "_known", {})


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> list[Placement]:
    """The placements of the next sessions; the last one stays."""
    left = [ON_GPU]
    monkeypatch.setattr(
        opening.placements, "read_placement", lambda *_, **__: left.pop(0) if len(left) > 1 else left[0]
    )
    return left


def plan(providers: Any = None, gpu: CudaDevice = GPUS[1], chosen: Any = None, **request: Any) -> Plan:
    requested = SessionRequest(NEG, providers=parse(providers, None), **request)
    return Plan(requested, ProviderList((CUDA, CPU), {CUDA: {"device_id": "1"}}), 1, gpu, chosen or {})


def constructed(construct: Constructor, made: Plan) -> dict[str, Any]:
    opening.construct_session(Session(), construct, made, GraphOutline(NEG))
    return construct.calls[-1]


def test_the_constructor_gets_the_plan_and_no_fallback(placements: list[Placement]) -> None:
    options = onnxruntime.SessionOptions()
    made = plan(sess_options=options, others={"disabled_optimizers": ["ConstantFolding"]})
    call = constructed(Constructor(), made)
    assert call["model"] is NEG
    assert call["options"] is options
    assert call["providers"] == [(CUDA, {"device_id": "1"}), (CPU, {})]
    assert call["enable_fallback"] == 0
    assert call["disabled_optimizers"] == ["ConstantFolding"]


def test_threads_and_dimensions_of_the_plan_are_set(
    placements: list[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, int] = {}
    options = SimpleNamespace(intra_op_num_threads=0, add_free_dimension_override_by_name=sizes.__setitem__)
    monkeypatch.setattr(opening, "recording", lambda _: options)
    constructed(Constructor(), plan(chosen={THREADS: ("4", "why"), DIMENSIONS: ('{"n": 8}', "why")}))
    assert (options.intra_op_num_threads, sizes) == (4, {"n": 8})


@pytest.mark.parametrize("is_plugin", [False, True])
def test_a_captured_session_has_a_stream_of_its_own(
    is_plugin: bool, placements: list[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def streams(ordinal: int) -> Any:
        asked.append(ordinal)
        return SimpleNamespace(handle=1234)

    monkeypatch.setattr(opening.graph_requests, "own_stream", streams)
    monkeypatch.setattr(opening, "load_runtime", lambda: SimpleNamespace(cuda_is_plugin=is_plugin))
    made = plan(chosen={CAPTURE: ("1", "a record")})
    options = constructed(Constructor(), made)["providers"][0][1]
    assert options.get("user_compute_stream") == (None if is_plugin else "1234")
    assert asked == [1]
    assert "user_compute_stream" not in constructed(Constructor(), plan())["providers"][0][1]


# With the options that suit the model

CHOICES = {**NO_HANDLES, **ON_FEW_THREADS}


def opened(
    construct: Constructor, made: Plan, monkeypatch: pytest.MonkeyPatch, chosen: Any = CHOICES, model: Any = NEG
) -> Any:
    monkeypatch.setattr(opening, "_record_for", lambda *_: None)
    monkeypatch.setattr(opening, "fit_to_model", lambda given, *_: replace(given, chosen={**given.chosen, **chosen}))
    ready = opening.Ready(made, RUNTIME, DRIVER)
    return opening.open_as_chosen(Session(), construct, ready, GraphOutline(model))


def test_a_session_is_opened_as_it_suits_its_model(
    placements: list[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    construct = Constructor()
    assert opened(construct, plan(), monkeypatch).plan.chosen == CHOICES
    assert [call["providers"][0][1].get("enable_cudnn") for call in construct.calls] == ["0"]


def test_what_the_placement_does_not_bear_goes_again(
    placements: list[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    placements[:] = [PLACED_ON_CPU, PLACED_ON_CPU]
    construct = Constructor()
    assert {*opened(construct, plan(), monkeypatch).plan.chosen} == {*NO_HANDLES}
    assert [call["options"].intra_op_num_threads for call in construct.calls] == [4, 0]


def test_a_choice_keeps_no_session_from_opening(placements: list[Placement], monkeypatch: pytest.MonkeyPatch) -> None:
    construct = Constructor(RuntimeError("an option that this release refuses"))
    assert opened(construct, plan(), monkeypatch).plan.chosen == {}
    assert [call["providers"][0][1].get("enable_cudnn") for call in construct.calls] == ["0", None]


def test_options_for_a_file_that_was_replaced_meanwhile_go(
    placements: list[Placement], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(NEG)
    monkeypatch.setattr(GraphOutline, "is_current", property(lambda _: False))
    construct = Constructor()
    assert opened(construct, plan(), monkeypatch, model=str(path)).plan.chosen == {}
    assert len(construct.calls) == 2


@pytest.mark.parametrize("changes", [{"is_guarded": True}])
def test_a_guarded_session_is_opened_as_its_library_asked(
    changes: dict[str, Any], placements: list[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(Constructor(), plan(**changes), monkeypatch).plan.chosen == {}


# Failures of the constructor


def failed(words: str, monkeypatch: pytest.MonkeyPatch, error: GPUError | None, *, works: bool = False) -> Any:
    monkeypatch.setattr(
        opening, "explain", lambda failure, outline: Diagnosed(error, False) if error is not None else None
    )
    monkeypatch.setattr(opening.lifetime, "gpu_works", lambda ordinal: works)
    monkeypatch.setattr(opening, "context_is_active", lambda ordinal: False)
    cause = RuntimeError(words)
    with pytest.raises((GPUError, RuntimeError)) as raised:
        opened(Constructor(cause, cause, cause), plan(), monkeypatch, chosen={})
    return raised.value


def test_a_failure_of_the_gpu_is_raised_as_diagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    error = DriverNotFoundError("no driver")
    raised = failed("CUDA failure 35", monkeypatch, error)
    assert raised is error
    assert isinstance(raised.__cause__, RuntimeError)


def test_a_failure_that_is_not_about_the_gpu_is_onnx_runtimes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(failed("this model is invalid", monkeypatch, None)) is RuntimeError
    sticky = PoisonedContextError("sticky", cuda_code=700)
    assert type(failed("a name with CUDA failure 700", monkeypatch, sticky, works=True)) is RuntimeError
    assert failed("CUDA failure 700", monkeypatch, sticky) is sticky


def test_a_model_that_cannot_be_captured_is_told_with_its_nodes(
    placements: list[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    placements[:] = [PLACED_ON_CPU]
    words = "This session cannot use the graph capture feature as requested by the user"
    monkeypatch.setattr(opening.graph_requests, "own_stream", lambda ordinal: None)
    construct = Constructor(RuntimeError(words))
    with pytest.raises(GPUError, match="cannot be captured") as raised:
        opened(construct, plan(cuda_graph=True), monkeypatch, chosen={})
    assert any("Unique" in line for line in raised.value.evidence)
    assert [call["providers"][0][1].get(CAPTURE) for call in construct.calls] == [None, "0"]


# Before the constructor


def found(monkeypatch: pytest.MonkeyPatch, made: Plan, runtime: Any = RUNTIME, cuda: CudaState = DRIVER) -> Any:
    """Return what ``find_gpu`` finds, or the class of the failure that it diagnoses."""
    diagnosed: list[UndiagnosedError] = []

    def diagnose(failure: UndiagnosedError, outline: GraphOutline) -> Diagnosed:
        diagnosed.append(failure)
        return Diagnosed(DriverNotFoundError("diagnosed"), False)

    monkeypatch.setattr(opening, "diagnose", diagnose)
    monkeypatch.setattr(opening, "open_provider", lambda *, register: runtime)
    monkeypatch.setattr(opening, "initialise", lambda: cuda)
    try:
        return opening.find_gpu(made, RUNTIME, None, GraphOutline(NEG))
    except DriverNotFoundError:
        return diagnosed


def report(**changes: Any) -> Any:
    assert RUNTIME.preload is not None
    return replace(RUNTIME, preload=replace(RUNTIME.preload, **changes))


def test_a_gpu_is_ready_where_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for ordinal in (0, 1):
        ready = found(monkeypatch, replace(plan(), device=ordinal, providers=ProviderList((CUDA, CPU))))
        assert ready.plan.gpu == GPUS[ordinal]
        assert ready.plan.provider_arguments()[0][1] == ({"device_id": "1"} if ordinal else {})


V100 = CudaDevice(0, "GPU-7", "NVIDIA V100", (7, 0), 16 << 30, 0)
WRONG: dict[str, tuple[Any, CudaState]] = {
    "a library is missing": (report(missing=(SimpleNamespace(required=True, soname="libcublas.so.13"),)), DRIVER),
    "no provider": (report(provider=None), DRIVER),
    "no report": (replace(RUNTIME, preload=None), DRIVER),
    "no driver library": (report(driver_missing=True), DRIVER),
    "the provider does not open": (replace(RUNTIME, provider_error="undefined symbol"), DRIVER),
    "the plugin is of another release": (replace(RUNTIME, plugin_problem="another release"), DRIVER),
    "cuInit fails": (RUNTIME, CudaState(999, None, 1)),
    "no driver": (RUNTIME, CudaState(None, None, 1)),
    "no gpu": (RUNTIME, CudaState(0, (), 1)),
    "no code for the gpu": (RUNTIME, CudaState(0, (V100,), 1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_whatever_is_wrong_is_diagnosed_and_not_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, cuda = WRONG[name]
    (failure,) = found(monkeypatch, replace(plan(allow_cpu=True), device=None), runtime, cuda)
    assert isinstance(failure, UndiagnosedError)
    assert len(opening._known) == 1, "the next session that may be on the CPU does not diagnose it again"


def test_an_old_driver_is_diagnosed_before_a_session_is_constructed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def is_older_than(cuda_major: int | None) -> bool:
        asked.append(cuda_major)
        return True

    monkeypatch.setattr(opening, "is_older_than", is_older_than)
    (failure,) = found(monkeypatch, replace(plan(), device=None))
    assert isinstance(failure, UndiagnosedError)
    assert asked == [13]


def test_a_gpu_with_code_for_its_family_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RUNTIME.preload is not None
    assert RUNTIME.preload.provider is not None
    provider = replace(RUNTIME.preload.provider, architectures=(Architecture(7, 0, False, False),))
    assert (
        found(monkeypatch, replace(plan(), device=None), report(provider=provider), CudaState(0, (V100,), 1)).plan.gpu
        == V100
    )


# Errors that are known already


def known(made: Plan) -> bool:
    try:
        opening._raise_known_error(made, RUNTIME)
    except DriverNotFoundError:
        return True
    return False


def test_a_known_error_is_raised_where_the_cpu_serves_and_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    may_be_on_cpu = plan(allow_cpu=True)
    assert not known(may_be_on_cpu)
    opening._remember(DriverNotFoundError("no driver"), may_be_on_cpu, RUNTIME)
    assert known(may_be_on_cpu)
    assert not known(plan(allow_cpu=False)), "without the CPU each session tries again"
    assert not known(replace(may_be_on_cpu, device=0))
    assert not known(plan(allow_cpu=True, is_guarded=True))
    assert not known(replace(may_be_on_cpu, providers=ProviderList((CUDA,), {CUDA: {"enable_cudnn": "0"}})))


@pytest.mark.parametrize(
    "variable", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "PATH"]
)
def test_a_known_error_ends_with_the_variables_that_decide(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(allow_cpu=True)
    opening._remember(DriverNotFoundError("no driver"), made, RUNTIME)
    monkeypatch.setenv(variable, os.environ.get(variable, "") + ":/elsewhere")
    assert not known(made)


# Ranks


def as_rank(monkeypatch: pytest.MonkeyPatch, local_rank: int | None, torch: int | None = None) -> None:
    monkeypatch.setattr(opening, "local_rank_of_several", lambda: local_rank)
    monkeypatch.setattr(opening, "device_of_torch", lambda: torch)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank or 0))


UNNAMED = replace(cpu_plan(SessionRequest(NEG)), gpu=GPUS[0])


@pytest.mark.parametrize(("torch", "device"), [(1, 1), (None, None)])
def test_a_rank_is_on_the_device_of_pytorch(
    torch: int | None, device: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 1, torch)
    assert opening._use_torch_device(UNNAMED).device == device
    named = replace(UNNAMED, request=SessionRequest(NEG, device=0), device=0)
    assert opening._use_torch_device(named).device == 0
    as_rank(monkeypatch, None, torch)
    assert opening._use_torch_device(UNNAMED).device is None


def warned(made: Plan, cuda: CudaState = DRIVER) -> bool:
    try:
        opening._warn_of_rank(Session(), opening.Ready(made, RUNTIME, cuda))
    except UserWarning:
        return True
    return False


def test_a_further_rank_on_the_first_gpu_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 1)
    assert warned(UNNAMED)
    assert not warned(replace(UNNAMED, gpu=GPUS[1]))
    assert not warned(replace(UNNAMED, request=SessionRequest(NEG, device=0)))
    assert not warned(UNNAMED, CudaState(0, GPUS[:1], 1)), "its launcher shows it its own GPU"
    as_rank(monkeypatch, 0)
    assert not warned(UNNAMED)


def test_a_provider_that_is_named_twice_is_told() -> None:
    request = SessionRequest(NEG, providers=parse([CUDA, CUDA, "CpuExecutionProvider"], None))
    with pytest.warns(UserWarning, match="named more than once"), pytest.raises(ProviderRequestError):
        opening.open_on_gpu(Session(), Constructor(), request, GraphOutline(NEG))


# The context of a plugin, whose first failure would end the process


@pytest.mark.parametrize(("code", "is_fine"), [(0, True), (None, True), (700, False), (2, False)])
def test_a_plugin_is_not_opened_in_a_context_that_fails(
    code: int | None, is_fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "context_error", lambda ordinal, *, is_opening: code)
    monkeypatch.setattr(opening, "context_is_active", lambda ordinal: True)
    monkeypatch.setattr(opening.lifetime, "noted", lambda error: error)
    monkeypatch.setattr(opening, "diagnose", lambda *_: Diagnosed(DriverNotFoundError("memory"), False))
    check: Callable[[bool], None] = lambda is_plugin: opening.check_context(  # noqa: E731 - one expression, two uses
        opening.Ready(plan(), SimpleNamespace(cuda_is_plugin=is_plugin), DRIVER),
        GraphOutline(NEG),
    )
    check(False)
    if is_fine:
        check(True)
    else:
        with pytest.raises((PoisonedContextError, DriverNotFoundError)):
            check(True)
