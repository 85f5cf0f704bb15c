"""Whatever is found when it is tried: no session opens while a finding stands that is fatal, and none is refused
without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from onnx import helper

from ortgpu.diagnosis import diagnosing
from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.facts import Facts, Observed, Request
from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.environment.libraries.catalogue import LIBRARIES
from ortgpu.environment.libraries.search import Candidate
from ortgpu.errors import DeviceNotFoundError, GPUError, LibraryNotFoundError
from ortgpu.model.outline import GraphOutline
from ortgpu.provider.devices import Device
from ortgpu.provider.preloading import MissingLibrary, PreloadReport
from ortgpu.provider.requests import parse
from ortgpu.provider.runtime import Runtime
from ortgpu.session import opening, verifying
from ortgpu.session.opening import open_on_gpu
from ortgpu.session.request import SessionRequest
from ortgpu.session.verifying import verify
from tests.support.made_facts import AVAILABLE, CUDA_H200, HEALTHY, SEEN_HEALTHY, SITE, SYMBOL, UUID

CUDA = "CUDAExecutionProvider"
WHOLE = cast(PreloadReport, SEEN_HEALTHY.observed.preload)
SONAMES = [spec.sonames[13] for spec in LIBRARIES if 13 in spec.sonames]

# CUDA numbers them from 0 on
DEVICES = st.lists(
    st.builds(
        CudaDevice,
        *(st.just(0), st.none() | st.sampled_from([UUID, "GPU-2"]), st.none() | st.just("NVIDIA H200")),
        *(st.none() | st.sampled_from([(9, 0), (8, 0), (6, 1), (12, 1)]), st.none(), st.none()),
    ),
    max_size=3,
).map(lambda devices: tuple(replace(device, ordinal=number) for number, device in enumerate(devices)))
RARELY = st.sampled_from([False] * 7 + [True])


def mostly(usual: object, other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """So that about every third session opens: each of several things has to be in order for that."""
    return RARELY.flatmap(lambda rare: other if rare else st.just(usual))


STATES = st.builds(
    CudaState,
    mostly(0, st.sampled_from([None, 3, 35, 46, 100, 803, 999])),
    mostly((CUDA_H200,), st.none()) | DEVICES,
    st.just(1),
)
MISSING = st.builds(
    MissingLibrary,
    *(st.sampled_from(SONAMES), st.booleans(), st.none()),
    st.just(()) | st.just((Candidate("libcublas.so.13", f"{SITE}/x", "directory", SITE, "truncated"),)),
)


def report_without(missing: Sequence[MissingLibrary], driver_missing: bool, mixed: bool) -> PreloadReport:
    gone = {library.soname for library in missing}
    kept = tuple(library for library in WHOLE.libraries if library.soname not in gone)
    parts = tuple(library.path for library in kept if "libcudnn" in library.soname) if mixed else ()
    return replace(WHOLE, libraries=kept, missing=tuple(missing), driver_missing=driver_missing, cudnn_mixed=parts)


def onnxruntime_with(*providers: str) -> Any:
    return SimpleNamespace(get_available_providers=lambda: list(providers), __version__="1.31.1")


REPORTS = mostly(WHOLE, st.none()) | st.builds(report_without, st.lists(MISSING, max_size=2), RARELY, RARELY)
RUNTIMES = st.builds(
    Runtime,
    st.just(HEALTHY.environment.packages),
    mostly(
        onnxruntime_with(*AVAILABLE),
        st.none() | st.just(onnxruntime_with("CPUExecutionProvider")),
    ),
    st.none(),
    REPORTS,
    provider_error=mostly(None, st.just(SYMBOL)),
)


DOMAINS = {"Rfft": "com.microsoft"}


def model_of(operators: Sequence[str]) -> bytes:
    """With these, and no more of a model than their names."""
    nodes = [helper.make_node(op, [], [], domain=DOMAINS.get(op, "")) for op in operators]
    return bytes(helper.make_model(helper.make_graph(nodes, "graph", [], [])).SerializeToString())


class OnCuda:
    """What ONNX Runtime would give, if nothing stood in the way. There are ``count`` GPUs."""

    def __init__(self, operators: Sequence[str], count: int) -> None:
        self.operators = operators
        self.count = count
        self._inputs_meta = self._outputs_meta = self.inputs_meta = self.outputs_meta = ()
        self._sess = self

    def construct(self, _model: Any, _options: Any, *, providers: Sequence[Any], **_others: Any) -> None:
        pairs = (entry if isinstance(entry, tuple) else (entry, {}) for entry in providers)
        options = {name: {"device_id": "0", **given} if name == CUDA else given for name, given in pairs}
        if int(options[CUDA]["device_id"]) >= self.count:
            raise RuntimeError("CUDA failure 101: invalid device ordinal")
        self._providers, self._provider_options = list(options), options

    def get_providers(self) -> list[str]:
        return self._providers

    def get_provider_graph_assignment_info(self) -> list[Any]:
        nodes = [SimpleNamespace(name=op, op_type=op, domain=DOMAINS.get(op, "")) for op in self.operators]
        return [SimpleNamespace(ep_name=CUDA, get_nodes=lambda: nodes)]


def outcome(
    session: OnCuda, runtime: Runtime, cuda: CudaState, device: int | str | None, providers: Any = None
) -> Device | GPUError:
    with (
        mock.patch.object(opening, "load_runtime", return_value=runtime),
        mock.patch.object(opening, "look_again", return_value=runtime),
        mock.patch.object(opening, "open_provider", return_value=runtime),
        mock.patch.object(verifying, "load_lazily_opened", return_value=runtime),
        mock.patch.object(opening, "initialise", return_value=cuda),
        mock.patch.object(opening, "context_is_active", return_value=None),
        mock.patch.object(verifying, "context_is_active", return_value=None),
        mock.patch.object(diagnosing, "UnreadEnvironment", return_value=HEALTHY.environment),
    ):
        try:
            request = SessionRequest(model_of(session.operators), device=device, providers=parse(providers, None))
            outline = GraphOutline(request.model)
            opened = open_on_gpu(cast(Any, session), session.construct, request, outline)
            return verify(cast(Any, session), opened, outline).device
        except GPUError as error:
            return error


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    runtime=RUNTIMES,
    cuda=STATES,
    device=st.none() | st.sampled_from([0, 1, "auto", UUID, "GPU-2"]),
    operators=st.lists(st.sampled_from(["Relu", "Conv", "Rfft"]), max_size=2),
)
def test_no_session_opens_while_something_fatal_stands(
    runtime: Runtime, cuda: CudaState, device: int | str | None, operators: list[str]
) -> None:
    count = 1 if cuda.devices is None else max(len(cuda.devices), 1)
    opened = outcome(OnCuda(operators, count), runtime, cuda, device)
    observed = Observed(
        None,
        runtime.module is not None,
        runtime.available_providers,
        runtime.preload,
        runtime.provider_error,
        cuda,
    )
    wanted = Request(
        device,
        tuple(op for op in operators if op == "Conv"),
        tuple(op for op in operators if op == "Rfft"),
    )
    found = find_problems(Facts(HEALTHY.environment, wanted, observed))
    fatal = [error for error in found if error.severity == "fatal"]
    event("opened" if isinstance(opened, Device) else "refused")
    if isinstance(opened, Device):
        assert [str(error) for error in fatal] == []
    else:
        assert opened.severity == "fatal"
        assert not fatal or opened.code in {error.code for error in fatal}


WORKS = Runtime(
    HEALTHY.environment.packages,
    onnxruntime_with(*AVAILABLE),
    None,
    WHOLE,
)


def test_a_session_without_cudnn_needs_cufft_all_the_same() -> None:
    without = report_without([MissingLibrary("libcufft.so.12", False, None, ())], driver_missing=False, mixed=False)
    runtime, cuda = replace(WORKS, preload=without), CudaState(0, (CUDA_H200,), 1)
    for providers in (None, [(CUDA, {"enable_cudnn": "0"})]):
        found = outcome(OnCuda(["Rfft"], 1), runtime, cuda, None, providers)
        assert isinstance(found, LibraryNotFoundError)
        assert found.missing == ("libcufft.so.12",)
        assert isinstance(outcome(OnCuda(["Relu"], 1), runtime, cuda, None, providers), Device)


@pytest.mark.parametrize(
    ("device", "ordinal"), [(None, 0), (0, 0), (1, 1), ("cuda:1", 1), ("auto", 0), (UUID, None), (2, None)]
)
def test_a_driver_that_does_not_list_its_gpus(device: int | str | None, ordinal: int | None) -> None:
    """ONNX Runtime is told which one all the same; it took the first one whatever was asked for."""
    session = OnCuda(["Relu"], 2)
    opened = outcome(session, WORKS, CudaState(0, None, 1), device)
    if ordinal is None:
        assert isinstance(opened, DeviceNotFoundError)
        assert repr(device) in opened.summary
    else:
        assert isinstance(opened, Device), opened
        assert opened.ordinal == ordinal
        assert session._provider_options[CUDA]["device_id"] == str(ordinal)
