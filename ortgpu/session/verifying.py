"""Verify an open session: that it is on its GPU, has the options of its plan, and can run its nodes there."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from ..environment.gpu.cuda import CudaState, context_is_active
from ..environment.gpu.driver import read_driver_version
from ..environment.libraries.catalogue import CUDNN_CODE, LIBRARIES, stem_of
from ..environment.libraries.wheel import coverage_by, read_architectures_of_cudnn
from ..environment.packages.plugins import listed_providers
from ..errors import PerformanceWarning, ProviderFallbackError, ProviderRequestError, manual
from ..model.contents import describe_model
from ..model.outline import GraphOutline
from ..process.late import late
from ..provider import placement as placements
from ..provider import requests
from ..provider.cudnn import cudnn_operators, operators_needing_cudnn
from ..provider.devices import Device
from ..provider.interfaces import Opened as OpenedSession
from ..provider.living import stacklevel
from ..provider.placement import CPUNodesWarning, Placement
from ..provider.preloading import PreloadReport
from ..provider.requests import CPUNodes
from ..provider.runtime import Runtime, load_lazily_opened, note_session
from ..provider.settings import LIMIT
from ..running.onnxruntimes import InferenceSession
from . import other_plugins
from .budget import not_limited
from .chosen import slow_search
from .plan import Opened, Plan, bound_to, undiagnosed_for
from .request import Verified
from .undiagnosed import UndiagnosedError, diagnose

if TYPE_CHECKING:
    from ..diagnosis.checks import classifier
else:
    classifier = late("ortgpu.diagnosis.checks.classifier")


def verify(session: OpenedSession, opened: Opened, outline: GraphOutline) -> Verified:
    """Return the facts of a session that is on its GPU.

    Raises:
        GPUError: the session is not on its GPU, or its nodes cannot run there.
    """
    try:
        return _verify(session, opened, outline)
    except UndiagnosedError as failure:
        undiagnosed = failure.with_traceback(None)  # The traceback refers to the session.
    raise diagnose(undiagnosed, outline).error


def _verify(session: OpenedSession, opened: Opened, outline: GraphOutline) -> Verified:
    plan, placement, runtime, cuda = opened
    plan = verify_plan(session, plan, runtime, cuda)
    if requests.CUDA in InferenceSession.get_providers(session):
        runtime = check_libraries_of_nodes(plan, placement, runtime, cuda, outline)
        _check_search(session, placement, runtime)
        note_session()
    check_cpu_nodes(session, placement, plan.request.cpu_nodes)
    gpu, version = plan.gpu, read_driver_version()
    device = Device("cuda", gpu.ordinal, gpu.uuid, gpu.name, gpu.compute_capability, gpu.total_memory, version)
    return Verified(device, placement, dict(plan.chosen), plan.budget)


def verify_plan(session: OpenedSession, plan: Plan, runtime: Runtime, cuda: CudaState) -> Plan:
    """Return the plan if the session is bound as planned. Add the GPU of providers that the SessionOptions carry."""
    expected = plan.providers.names
    bound = tuple(InferenceSession.get_providers(session))  # A subclass may override get_providers.
    ours = requests.CUDA in bound and {requests.CUDA, requests.CPU, *requests.TENSORRT}.issuperset(bound)
    if plan.providers_in_options and not ours:
        other = other_plugins.bound_plugin(bound)
        if other is None:
            raise missing_cuda_error(bound)
        return bound_to(plan, other_plugins.verified_ordinal(session, other, cuda), cuda)
    if requests.CUDA not in bound:
        raise undiagnosed_for(plan, runtime, cuda)
    if plan.request.is_guarded:  # Plain ONNX Runtime silently leaves out plugins that it opens only by device.
        expected = tuple(name for name in expected if name in bound)
    if bound[: len(expected)] != expected and not plan.providers_in_options:
        raise ProviderFallbackError(
            "ONNX Runtime bound other providers than those asked for",
            evidence=[f"asked for: {', '.join(expected)}", f"bound: {', '.join(bound)}"],
            bound=bound,
        )
    options = InferenceSession.get_provider_options(session)[requests.CUDA]
    ignored = [name for name, (value, _) in plan.chosen.items() if options.get(name, value) != value]
    if ignored:  # A plugin of 1.31.1, for instance, leaves enable_cudnn on.
        plan = plan.without(ignored)
    if LIMIT in ignored:
        if plan.request.memory is not None:
            raise not_limited("the CUDA provider of this process ignores gpu_mem_limit")
        plan = replace(plan, budget=None)
    gpu_id = options.get("device_id", "0")
    if plan.providers_in_options:
        plan = bound_to(plan, int(gpu_id), cuda)
    ordinal = plan.gpu.ordinal
    if gpu_id != str(ordinal):
        raise ProviderFallbackError(f"ONNX Runtime bound cuda:{gpu_id} and cuda:{ordinal} was asked for", bound=bound)
    if cuda.devices is not None and context_is_active(ordinal) is False:
        raise ProviderFallbackError(
            f"ONNX Runtime bound cuda:{ordinal}, and this process has no CUDA context there", bound=bound
        )
    return plan


def missing_cuda_error(bound: tuple[str, ...]) -> ProviderRequestError:
    """Return the error of a session without CUDA among the providers of its SessionOptions."""
    return ProviderRequestError(
        "the providers that the SessionOptions carry leave this session "
        + ("on the CPU" if bound == (requests.CPU,) else "on other providers than CUDA"),
        evidence=[
            "set by add_provider_for_devices or set_provider_selection_policy",
            f"devices that they choose from: {', '.join(listed_providers()) or 'none'}",
            f"bound: {', '.join(bound)}",
        ],
        fixes=[
            manual('name the provider instead: providers=["CUDAExecutionProvider"], with onnxruntime-gpu'),
            manual("or register the plugin that has it, before these options are made"),
            manual('or say that the CPU is meant: providers=["CPUExecutionProvider"]'),
        ],
        requested=bound,
    )


def check_libraries_of_nodes(
    plan: Plan, placement: Placement, runtime: Runtime, cuda: CudaState, outline: GraphOutline
) -> Runtime:
    """Raise the error that the first node needing cuDNN or cuFFT would raise; return the runtime with both loaded.

    ONNX Runtime 1.28 and newer bind CUDA without these libraries.
    """
    placed = placement.placed_on(requests.CUDA)
    operators, transforms = cudnn_operators(placed), placements.cufft_operators(placed)
    if operators and plan.cudnn_disabled:
        operators = operators_needing_cudnn(outline, placed)
    if operators and plan.cudnn_disabled:
        raise classifier.cudnn_disabled(operators, [])
    is_unknown = not placement.known and not plan.cudnn_disabled
    if operators or transforms or is_unknown:
        runtime = load_lazily_opened(_stems_for(operators, transforms, everything=is_unknown))
    report = runtime.preload
    if report is None:
        return runtime
    lacks_cudnn = report.path_of("libcudnn") is None or any(
        stem_of(lib.soname).startswith("libcudnn") for lib in report.missing
    )
    lacks_cudnn = lacks_cudnn or bool(report.cudnn_mixed)
    if operators and lacks_cudnn:
        operators = operators_needing_cudnn(outline, placed)
    lacks_cufft = bool(transforms) and report.path_of("libcufft") is None
    if (operators and lacks_cudnn) or lacks_cufft:
        raise undiagnosed_for(plan, runtime, cuda, placed)
    if (operators or is_unknown) and _cudnn_lacks_code(report, plan.gpu.compute_capability):
        placed = placed if placement.known else describe_model(outline).operators
        if operators_needing_cudnn(outline, placed):
            raise undiagnosed_for(plan, runtime, cuda, placed)
    return runtime


def _cudnn_lacks_code(report: PreloadReport, capability: tuple[int, int] | None) -> bool:
    architectures = _read_architectures_once(tuple(filter(None, map(report.path_of, CUDNN_CODE))))
    return capability is not None and coverage_by(architectures, capability, os.environ) == "none"


_read_architectures_once = functools.cache(read_architectures_of_cudnn)  # Loaded files do not change.


def _stems_for(cudnn: tuple[str, ...], cufft: tuple[str, ...], *, everything: bool) -> frozenset[str]:
    stems: set[str] = set()
    if cudnn or everything:
        stems |= {spec.stem for spec in LIBRARIES if spec.is_cudnn} | {"libnvrtc", "libcudart"}
        if not everything and not {"RNN", "GRU", "LSTM"} & set(cudnn):
            # They serve recurrent networks and attention, and causal convolutions.
            stems -= {"libcudnn_adv", "libcudnn_ext"}
    if cufft or everything:
        stems |= {"libcufft", "libnvJitLink"}
    return frozenset(stems)


def check_cpu_nodes(session: object, placement: Placement, cpu_nodes: CPUNodes) -> None:
    """Warn of nodes that compute on the CPU, or raise PlacementError."""
    if cpu_nodes == "forbid":
        refusal = placements.refusal(placement)
        if refusal is not None:
            raise refusal
    elif cpu_nodes == "warn":
        warning = placements.warning(placement)
        if warning is not None:
            warnings.warn(CPUNodesWarning(warning), stacklevel=stacklevel(session))


def _check_search(session: OpenedSession, placement: Placement, runtime: Runtime) -> None:
    """Warn if the search for algorithms makes cuDNN 9 run each convolution by its slowest algorithm."""
    report = runtime.preload
    options = InferenceSession.get_provider_options(session)[requests.CUDA]
    warning = slow_search(options, placement, report.path_of("libcudnn") if report is not None else None)
    if warning is not None:
        warnings.warn(PerformanceWarning(warning), stacklevel=stacklevel(session))
