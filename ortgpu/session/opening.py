"""Open an InferenceSession as planned and verify it, or raise the reason why it cannot be.

It works on any instance of ``onnxruntime.InferenceSession`` under construction; the caller passes the original
constructor. ``onnxruntime`` must be imported already.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..environment.gpu.cuda import CudaState, context_error, context_is_active, initialise
from ..environment.gpu.driver import read_driver_version
from ..environment.libraries.catalogue import CUDNN_CODE, LIBRARIES, stem_of
from ..environment.libraries.loader import loader_of_this_process
from ..environment.libraries.wheel import coverage_by, read_architectures_of_cudnn
from ..environment.packages.plugins import list_other_cuda_plugins, listed_providers, registered_library, takes_ordinal
from ..environment.ranks import LOCAL_RANKS
from ..errors import (
    CollectiveOpsUnavailableError,
    CPUExecutionWarning,
    GPUError,
    InsufficientDeviceMemoryError,
    PerformanceWarning,
    PlacementError,
    PoisonedContextError,
    ProviderError,
    ProviderFallbackError,
    ProviderRequestError,
    manual,
)
from ..model.contents import describe_model, read_collective_operators
from ..model.files import ModelSource
from ..model.outline import GraphOutline
from ..process.background import Task, is_of_a_handler
from ..process.late import late
from ..provider import lifetime, requests
from ..provider import placement as placements
from ..provider.cudnn import cudnn_operators, operators_needing_cudnn
from ..provider.devices import CPU as CPU_DEVICE
from ..provider.devices import Device
from ..provider.living import stacklevel
from ..provider.options import CPU_FALLBACK_KEY, keeps_cpu_out, recording
from ..provider.placement import CPUNodesWarning, Placement
from ..provider.preloading import PreloadReport
from ..provider.rank_devices import device_of_torch, local_rank_of_several, warning_of_rank
from ..provider.records import Found, VoidRecordError, find_record
from ..provider.requests import CPUNodes
from ..provider.runtime import Runtime, load_lazily_opened, load_runtime, look_again, open_provider
from ..provider.settings import CAPTURE, DIMENSIONS, FLOAT16, LIMIT, THREADS
from ..provider.tensorrt import check_loadable, check_plugin
from ..running.onnxruntimes import InferenceSession, session_on_cpu
from . import other_plugins
from .budget import not_limited, too_small
from .chosen import slow_search, unfit
from .plan import STREAM, Plan, bound_to, for_model, on_cpu, on_gpu, plan_of, why_untuned
from .plugin_limits import check_before_opening, check_before_running
from .request import SessionRequest, Verified, cpu_is_allowed_by_variable

if TYPE_CHECKING:
    from ..diagnosis import diagnosing, facts
    from ..diagnosis.checks import classifier
    from ..running import graph_requests
    from ..running.plain_runs import RunningSession
    from .tuning import halving
else:
    classifier = late("ortgpu.diagnosis.checks.classifier")
    facts = late("ortgpu.diagnosis.facts")
    halving = late("ortgpu.session.tuning.halving")
    graph_requests = late("ortgpu.running.graph_requests")
    diagnosing = late("ortgpu.diagnosis.diagnosing")

logger = logging.getLogger("ortgpu")

_has_opened = False  # True once a session has opened, so the provider is loaded

# Errors that do not depend on the model, by process, device, variables and files
_known: dict[tuple[Any, ...], GPUError] = {}
_MANY = 32
# Variables that the driver and the search for libraries read at each call, not only at the start of the process
_DECISIVE = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_HOME", "CUDA_PATH", "CUDNN_HOME",
    "CUDNN_PATH", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PATH",
)  # fmt: skip


def open_on_gpu(
    session: RunningSession,
    construct: Callable[..., None],
    request: SessionRequest,
    outline: GraphOutline,
    driver: Task[CudaState] | None = None,
) -> Verified:
    """Construct ``session`` on the GPU that the request names, and verify it; or on the CPU after an earlier error.

    ``construct`` is InferenceSession's own ``__init__``, bound to ``session``; ``outline`` that of its model;
    ``driver`` the initialisation of the driver, if it has begun.

    Raises:
        GPUError: the cause. The instance may be half made, and the caller must drop what it holds.
        Exception: ONNX Runtime's own, if it is not about the GPU.
    """
    for name in request.providers.repeated:
        warnings.warn(f"{name} is named more than once: the first counts", stacklevel=stacklevel(session))
    runtime = load_runtime() if _has_opened else look_again()
    context = OpeningContext(plan_of(request, runtime), runtime, outline, driver)
    known = _known_error(context)
    if known is not None:
        return open_on_cpu(session, construct, request, outline, known)
    _find_gpu(context)
    _warn_of_rank(session, context)
    _check_context(context)
    _check_tensorrt(context)
    check_before_opening(request, context.runtime, outline)
    plan, placement = _open_as_chosen(session, construct, context, outline)
    check_before_running(placement, context.runtime, outline)
    return _verify(session, plan, placement, context)


def open_on_cpu(
    session: RunningSession,
    construct: Callable[..., None],
    request: SessionRequest,
    outline: GraphOutline,
    error: GPUError,
) -> Verified:
    """Construct ``session`` on the CPU if its caller allowed that, or else raise ``error``."""
    if not _cpu_is_allowed(request, error):
        _refuse_broken_model(request, outline, error)
        raise error
    error.__traceback__ = None  # it names the session, and whoever keeps the warning keeps the error
    verified = Verified(CPU_DEVICE, _open(session, construct, on_cpu(request), outline), {})
    warn_of_cpu(session, error, request.model)  # after opening, since ONNX Runtime may refuse the model
    return verified


def _known_error(context: OpeningContext) -> GPUError | None:
    """Return an earlier error again if the CPU is allowed instead, and the surroundings have not changed."""
    if not _cpu_is_allowed(context.plan.request):
        return None
    known = _known.get(_surroundings(context))
    return lifetime.fresh_copy(known) if known is not None else None


def _find_gpu(context: OpeningContext) -> None:
    """Plan for the requested GPU. Raises GPUError if this process cannot open sessions on it."""
    try:
        cuda = _working_driver(context)
        context.plan = on_gpu(_with_device_of_torch(context.plan), cuda)
        report, capability = context.runtime.preload, context.plan.gpu.compute_capability
        provider = report.provider if report is not None else None
        if provider is not None and capability is not None and provider.coverage(capability, os.environ) == "none":
            raise context.diagnose()
    except GPUError as error:
        if not context.depends_on_model:
            if len(_known) >= _MANY:
                _known.clear()
            _known[_surroundings(context)] = lifetime.fresh_copy(error)
        raise


def _with_device_of_torch(plan: Plan) -> Plan:
    """Return the plan of a rank with PyTorch's current device, if none was requested."""
    if not _may_be_rank(plan) or plan.request.is_guarded:
        return plan
    return plan if local_rank_of_several() is None else dataclasses.replace(plan, device=device_of_torch())


def _may_be_rank(plan: Plan) -> bool:
    """Return True if no device was requested, and a launcher may have started several processes on this host."""
    request = plan.request
    is_named = request.device is not None or any("device_id" in own for own in request.providers.options.values())
    return not (is_named or plan.is_carried) and any(name in os.environ for name in LOCAL_RANKS)


def _warn_of_rank(session: RunningSession, context: OpeningContext) -> None:
    """Warn if several ranks open their sessions on GPU 0 because none of them names a device."""
    devices, plan = context.ask_driver().devices, context.plan
    if plan.gpu.ordinal != 0 or devices is None or len(devices) < 2 or not _may_be_rank(plan):
        return
    local_rank = local_rank_of_several()
    if local_rank:
        warnings.warn(warning_of_rank(local_rank), stacklevel=stacklevel(session))


def _working_driver(context: OpeningContext) -> CudaState:
    """Return the driver's answers. Raises GPUError if it, the provider or its libraries do not work."""
    runtime = context.runtime
    if requests.CUDA not in (runtime.available_providers or ()) and (others := list_other_cuda_plugins()):
        if context.plan.is_carried:
            return _check_driver(context)
        raise other_plugins.why_not_used(others)
    if requests.CUDA not in (runtime.available_providers or ()) or runtime.packages.onnxruntime.is_of_another_release:
        raise context.diagnose()
    if runtime.cuda_is_plugin:  # which ends a process whose CUDA does not work
        _check_driver(context)
    context.runtime = opened = open_provider(register=not context.plan.request.is_guarded)
    report, refused = opened.preload, opened.provider_error is not None or opened.plugin_problem is not None
    if report is None or not report.ok or report.driver_missing or refused:
        context.ask_driver()
        raise context.diagnose()
    return _check_driver(context)


def _check_driver(context: OpeningContext) -> CudaState:
    cuda = context.ask_driver()
    if cuda.code != 0:
        raise lifetime.forked_error(cuda.code) or context.diagnose()
    if cuda.devices is not None and not cuda.devices:
        raise context.diagnose()
    return cuda


def _check_context(context: OpeningContext) -> None:
    """Make the context if there is none, and raise what its calls return: a plugin would end the process for it."""
    if not context.runtime.cuda_is_plugin:
        return
    is_known = not context.plan.is_carried or context.plan.device is not None
    ordinals = [context.plan.gpu.ordinal] if is_known else [gpu.ordinal for gpu in context.ask_driver().devices or ()]
    for ordinal in ordinals:
        code = context_error(ordinal, is_opening=is_known)
        if code in (None, 0) or (code == lifetime.OUT_OF_MEMORY and not is_known):
            continue
        if code == lifetime.OUT_OF_MEMORY or context_is_active(ordinal) is False:
            raise context.diagnose(
                RuntimeError(f"CUDA failure {code}: no CUDA context for a session on cuda:{ordinal}")
            )
        words = f"each call in this process's CUDA context on cuda:{ordinal} returns {code}"
        raise lifetime.noted(classifier.explain_run_code(code, words, None))


def _surroundings(context: OpeningContext) -> tuple[Any, ...]:
    """Return the facts that decide whether the device can be used, as far as each session reads them again."""
    plan, stamp = context.plan, context.runtime.provider_stamp
    loaded = len(loader_of_this_process().handles), registered_library()
    asked = plan.device, plan.cudnn_disabled, plan.request.is_guarded
    return os.getpid(), asked, stamp, loaded, tuple(map(os.environ.get, _DECISIVE))


def _check_tensorrt(context: OpeningContext) -> None:
    """Raise the error of a TensorRT provider that cannot be opened before CUDA: built in, or of a plugin."""
    for name in set(requests.TENSORRT).intersection(context.plan.providers.names):
        bridge = context.runtime.packages.onnxruntime.bridge
        if name in listed_providers():
            check_plugin(name, context.plan.gpu)
            if not takes_ordinal(name):
                context.plan = context.plan.without_ordinal(name)
        elif name == requests.TENSORRT[0] and bridge is not None:
            check_loadable(bridge)


def _open_as_chosen(
    session: RunningSession, construct: Callable[..., None], context: OpeningContext, outline: GraphOutline
) -> tuple[Plan, Placement]:
    """Open the session with what suits its model, or without. Return the plan that held, and the placement."""
    plan = context.plan
    if not (plan.request.is_guarded or plan.is_carried):
        opened = _open_with_choices(session, construct, plan, outline, context.runtime)
        if opened is not None:
            return opened
    try:
        placement = _open(session, construct, plan, outline)
    except Exception as cause:
        error = _placement_refused(cause) or _capture_refused(cause, session, construct, plan, outline)
        error = error or context.diagnose(cause)
        if isinstance(error, InsufficientDeviceMemoryError) and plan.budget is not None and LIMIT in plan.chosen:
            error = too_small(error, plan.budget)
        if error is None or (isinstance(error, PoisonedContextError) and lifetime.gpu_works(plan.gpu.ordinal)):
            raise  # ONNX Runtime's own error, not about the GPU
        if context_is_active(plan.gpu.ordinal) is False:
            raise error from cause  # this process has no CUDA context that could be lost
        raise lifetime.noted(error) from cause
    return plan, placement


def _open_with_choices(
    session: RunningSession, construct: Callable[..., None], plan: Plan, outline: GraphOutline, runtime: Runtime
) -> tuple[Plan, Placement] | None:
    """Open the session with what suits its model. None if nothing does, or if the session does not open so."""
    record = _record_for(session, plan, outline)
    chosen = for_model(plan, runtime.release, outline, record)
    while chosen != plan:
        try:
            placement = _open(session, construct, chosen, outline)
        except Exception as refusal:  # a choice must not keep a session from opening
            if is_of_a_handler(refusal):
                raise
            # Log the text alone: a handler may keep the error, and the error keeps the half-made session.
            logger.debug("a session does not open as chosen: %s", str(refusal))
            if record is not None:
                logger.warning("a session does not open with the record %s", record.path)
            return None
        is_current, dropped = outline.is_current, unfit(chosen.chosen, placement)
        if is_current and not dropped:
            return chosen, placement
        chosen = chosen.without(dropped) if is_current else plan  # else they were chosen for another model
        for name in lifetime.HELD_BY_ONNXRUNTIME:  # free it first: the GPU may not have room for two
            vars(session).pop(name, None)
    return None


def _record_for(session: RunningSession, plan: Plan, outline: GraphOutline) -> Found | None:
    """Return the record of tune that the session uses, if there is one. The log says why one is not used."""
    tuned, refusal = plan.request.tuned, why_untuned(plan.request)
    named = None if isinstance(tuned, bool) or tuned == "now" else tuned
    if refusal is not None:
        if named is not None or tuned == "now":
            logger.warning("a session uses no record of tune: %s", refusal)
        return None
    found = _sound_record(plan, outline, named)
    if found is not None or tuned != "now":
        return found
    try:
        session._gpu_tune(plan.request.model, plan.gpu.ordinal)
    except Exception as error:  # a session opens without a record
        if is_of_a_handler(error):
            raise
        logger.warning("a model could not be tuned: %s: %s", type(error).__name__, str(error))
    return _sound_record(plan, outline, None)


def _sound_record(plan: Plan, outline: GraphOutline, named: str | os.PathLike[str] | None) -> Found | None:
    try:
        return find_record(outline, plan.gpu, named)
    except VoidRecordError as error:
        logger.warning("a record of tune is not used: %s", error)
        return None


def _open(session: RunningSession, construct: Callable[..., None], plan: Plan, outline: GraphOutline) -> Placement:
    """Call InferenceSession's constructor as planned. Return the placement."""
    request = plan.request
    model, options = request.model, recording(request.sess_options)
    if THREADS in plan.chosen:  # these are chosen only where the caller passed no SessionOptions
        options.intra_op_num_threads = int(plan.chosen[THREADS][0])
    if DIMENSIONS in plan.chosen:
        for name, size in json.loads(plan.chosen[DIMENSIONS][0]).items():
            options.add_free_dimension_override_by_name(name, size)
    if FLOAT16 in plan.chosen:
        model = halving.in_float16(request.model)
        outline = GraphOutline(model)
    arguments = _in_own_stream(session, plan).as_arguments()
    construct(model, options, providers=arguments, enable_fallback=0, **request.others)
    if model is not request.model:
        in_bytes = isinstance(request.model, bytes)
        vars(session).update(  # as if the caller's model had been passed
            _model_path=None if in_bytes else os.fspath(request.model),
            _model_bytes=request.model if in_bytes else None,
        )
    return placements.read_placement(session, outline, without_options=request.sess_options is None)


def _in_own_stream(session: RunningSession, plan: Plan) -> Plan:
    """Give a plan that captures CUDA graphs a stream of the session's own. That of an earlier attempt is freed."""
    vars(session).pop("_stream", None)
    if not plan.captures:
        return plan
    session._stream = graph_requests.own_stream(plan.gpu.ordinal)
    if session._stream is None or load_runtime().cuda_is_plugin:  # one of 1.31.1 begins each capture twice with it
        return plan
    return plan.with_cuda_options({STREAM: str(session._stream.handle)})


def _verify(session: RunningSession, plan: Plan, placement: Placement, context: OpeningContext) -> Verified:
    """Return the facts of a session that is on its GPU. Raises GPUError for any other."""
    global _has_opened
    plan = _verified_plan(session, plan, context)
    if requests.CUDA in InferenceSession.get_providers(session):
        _check_lazily_opened(placement, context)
        _check_search(session, placement, context)
        _has_opened = True
    _check_cpu_nodes(session, placement, plan.request.cpu_nodes)
    gpu, version = plan.gpu, read_driver_version()
    device = Device("cuda", gpu.ordinal, gpu.uuid, gpu.name, gpu.compute_capability, gpu.total_memory, version)
    return Verified(device, placement, dict(plan.chosen), plan.budget)


def _verified_plan(session: RunningSession, plan: Plan, context: OpeningContext) -> Plan:
    """Return the plan, with the GPU that carried providers are on, if the session is bound as planned."""
    expected = plan.providers.names
    bound = tuple(InferenceSession.get_providers(session))  # a subclass may override it
    ours = requests.CUDA in bound and {requests.CUDA, requests.CPU, *requests.TENSORRT}.issuperset(bound)
    if plan.is_carried and not ours:
        other = other_plugins.bound_plugin(bound)
        if other is None:
            raise without_cuda(bound)
        cuda = context.ask_driver()
        return bound_to(plan, other_plugins.verified_ordinal(session, other, cuda), cuda)
    if requests.CUDA not in bound:
        raise context.diagnose()
    if plan.request.is_guarded:  # plain ONNX Runtime leaves out, without a word, plugins that it opens by device only
        expected = tuple(name for name in expected if name in bound)
    if bound[: len(expected)] != expected and not plan.is_carried:
        raise ProviderFallbackError(
            "ONNX Runtime bound other providers than those asked for",
            evidence=[f"asked for: {', '.join(expected)}", f"bound: {', '.join(bound)}"],
            bound=bound,
        )
    options = InferenceSession.get_provider_options(session)[requests.CUDA]
    ignored = [name for name, (value, _) in plan.chosen.items() if options.get(name, value) != value]
    if ignored:  # a plugin of 1.31.1 leaves enable_cudnn on, for instance
        plan = plan.without(ignored)
    if LIMIT in ignored:
        if plan.request.memory is not None:
            raise not_limited("the CUDA provider of this process ignores gpu_mem_limit")
        plan = replace(plan, budget=None)
    found, cuda = options.get("device_id", "0"), context.ask_driver()
    if plan.is_carried:
        plan = context.plan = bound_to(plan, int(found), cuda)
    ordinal = plan.gpu.ordinal
    if found != str(ordinal):
        raise ProviderFallbackError(f"ONNX Runtime bound cuda:{found} and cuda:{ordinal} was asked for", bound=bound)
    if cuda.devices is not None and context_is_active(ordinal) is False:
        raise ProviderFallbackError(
            f"ONNX Runtime bound cuda:{ordinal}, and this process has no CUDA context there", bound=bound
        )
    return plan


def without_cuda(bound: tuple[str, ...]) -> ProviderRequestError:
    """Return the error for a session that the providers in its SessionOptions leave without CUDA."""
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


def _check_lazily_opened(placement: Placement, context: OpeningContext) -> None:
    """Raise the error that the first node needing cuDNN or cuFFT would raise.

    ONNX Runtime 1.28 and newer bind CUDA without these libraries.
    """
    placed = placement.placed_on(requests.CUDA)
    operators, transforms = cudnn_operators(placed), placements.cufft_operators(placed)
    is_disabled, outline = context.plan.cudnn_disabled, context.outline
    if operators and is_disabled:
        operators = operators_needing_cudnn(outline, placed)
    if operators and is_disabled:
        raise classifier.cudnn_disabled(operators, [])
    is_unknown = not placement.known and not is_disabled
    if operators or transforms or is_unknown:
        context.runtime = load_lazily_opened(_stems_for(operators, transforms, everything=is_unknown))
    report = context.runtime.preload
    if report is None:
        return
    lacks_cudnn = report.path_of("libcudnn") is None or any(
        stem_of(lib.soname).startswith("libcudnn") for lib in report.missing
    )
    lacks_cudnn = lacks_cudnn or bool(report.cudnn_mixed)
    if operators and lacks_cudnn:
        operators = operators_needing_cudnn(outline, placed)
    if (operators and lacks_cudnn) or (transforms and report.path_of("libcufft") is None):
        context.operators = placed
        raise context.diagnose()
    if (operators or is_unknown) and _cudnn_lacks_code(report, context.plan.gpu.compute_capability):
        context.operators = placed if placement.known else describe_model(outline).operators
        if operators_needing_cudnn(outline, context.operators):
            raise context.diagnose()


def _cudnn_lacks_code(report: PreloadReport, capability: tuple[int, int] | None) -> bool:
    held = _read_architectures_once(tuple(filter(None, map(report.path_of, CUDNN_CODE))))
    return capability is not None and coverage_by(held, capability, os.environ) == "none"


_read_architectures_once = functools.cache(read_architectures_of_cudnn)  # loaded files do not change


def _stems_for(cudnn: tuple[str, ...], cufft: tuple[str, ...], *, everything: bool) -> frozenset[str]:
    stems: set[str] = set()
    if cudnn or everything:
        stems |= {spec.stem for spec in LIBRARIES if spec.is_cudnn} | {"libnvrtc", "libcudart"}
        if not everything and not {"RNN", "GRU", "LSTM"} & set(cudnn):
            stems -= {"libcudnn_adv", "libcudnn_ext"}  # recurrent networks and attention, causal convolutions
    if cufft or everything:
        stems |= {"libcufft", "libnvJitLink"}
    return frozenset(stems)


def _check_cpu_nodes(session: RunningSession, placement: Placement, cpu_nodes: CPUNodes) -> None:
    """Warn of nodes that compute on the CPU, or raise PlacementError."""
    if cpu_nodes == "forbid":
        refusal = placements.refusal(placement)
        if refusal is not None:
            raise refusal
    elif cpu_nodes == "warn":
        warning = placements.warning(placement)
        if warning is not None:
            warnings.warn(CPUNodesWarning(warning), stacklevel=stacklevel(session))


def _check_search(session: RunningSession, placement: Placement, context: OpeningContext) -> None:
    """Warn of a search for convolutions with which cuDNN 9 runs each by its slowest way."""
    report = context.runtime.preload
    options = InferenceSession.get_provider_options(session)[requests.CUDA]
    warning = slow_search(options, placement, report.path_of("libcudnn") if report is not None else None)
    if warning is not None:
        warnings.warn(PerformanceWarning(warning), stacklevel=stacklevel(session))


def _cpu_is_allowed(request: SessionRequest, error: GPUError | None = None) -> bool:
    """Return True if the CPU may serve after ``error``, or any error. It does not mend a wrong request."""
    if keeps_cpu_out(request.sess_options) or (error is not None and _is_of_the_request(error, request)):
        return False
    return cpu_is_allowed_by_variable() if request.allow_cpu is None else request.allow_cpu


def warn_of_cpu(session: object, error: GPUError, model: ModelSource) -> None:
    """Warn that a session is on the CPU because of ``error``.

    The log has it too, in one line, where logging is set up or the program hides warnings. Elsewhere Python would print
    the line beside the warning.
    """
    warning = CPUExecutionWarning(error, "<bytes>" if isinstance(model, bytes) else os.fsdecode(model))
    if logger.hasHandlers() or _is_hidden(CPUExecutionWarning):
        text = "%s runs on the CPU, which was allowed [%s]: %s"
        logger.warning(text, warning.model, error.code, error.summary, extra={"warning": warning})
    warnings.warn(warning, stacklevel=stacklevel(session))


def _is_hidden(category: type[Warning]) -> bool:
    """Return True if the first filter for warnings of this category, in all modules, ignores them."""
    actions = (
        action
        for action, message, hidden, module, line in warnings.filters
        if message is None and module is None and not line and issubclass(category, hidden)
    )
    return next(actions, "default") == "ignore"


def _is_of_the_request(error: GPUError, request: SessionRequest) -> bool:
    if isinstance(error, PlacementError):  # without these, of a plugin that cannot compute the model
        return request.cpu_nodes == "forbid" or request.cuda_graph or keeps_cpu_out(request.sess_options)
    of_the_request = (ProviderError, CollectiveOpsUnavailableError)
    return isinstance(error, of_the_request) and not isinstance(error, ProviderFallbackError)


def _refuse_broken_model(request: SessionRequest, outline: GraphOutline, error: GPUError) -> None:
    """Raise ONNX Runtime's own error for a model that it cannot read, if ``error`` came before it saw the model.

    ONNX Runtime is asked only if our own reader finds a problem, since it would parse the whole model. A model that
    then opens on the CPU is not broken.
    """
    if error.__cause__ is not None or _is_of_the_request(error, request):
        return
    facts = describe_model(outline)
    if facts.problem is None and not facts.data_problems:
        return
    options = request.sess_options if request.sess_options is not None else native.get_default_session_options()
    try:
        session_on_cpu(request.model, options)
    except Exception as refusal:
        if _placement_refused(refusal) is None:
            raise refusal from None


def _placement_refused(cause: BaseException) -> PlacementError | None:
    if "fallback to CPU EP has been explicitly disabled" not in str(cause):
        return None
    return PlacementError(
        "nodes of this model are on the CPU, and the session options forbid that",
        evidence=[str(cause).strip().splitlines()[0], f"{CPU_FALLBACK_KEY}=1, which counts shape nodes too"],
        fixes=[manual('leave that entry out and pass cpu_nodes="forbid": it tells compute nodes from shape nodes')],
    )


def _capture_refused(
    cause: BaseException,
    session: RunningSession,
    construct: Callable[..., None],
    plan: Plan,
    outline: GraphOutline,
) -> GPUError | None:
    if not graph_requests.is_refusal(cause):
        return None
    try:
        placement = _open(session, construct, plan.with_cuda_options({CAPTURE: "0"}), outline)  # to learn it
    except Exception:  # noqa: BLE001 - the refusal stands, with fewer details
        placement = placements.UNKNOWN
    return graph_requests.why_not_captured(cause, placement, outline)


class OpeningContext:
    """The plan of a session and the facts that a diagnosis needs if it does not open."""

    def __init__(
        self, plan: Plan, runtime: Runtime, outline: GraphOutline, driver: Task[CudaState] | None = None
    ) -> None:
        self.plan = plan
        self.outline = outline
        self.runtime = runtime
        self._driver = driver  # its initialisation, if that has begun
        self.cuda: CudaState | None = None
        self.operators: frozenset[tuple[str, str]] | None = None  # as placed; None: read them from the model file
        self.depends_on_model = False  # of the last diagnosis

    def ask_driver(self) -> CudaState:
        self.cuda = cuda = self._driver.result() if self._driver is not None else initialise()
        return cuda

    def diagnose(self, cause: BaseException | None = None) -> Any:
        """Return the error to raise, or None if ``cause`` has nothing to do with the GPU."""
        operators = self.operators
        if operators is None:  # read the model only if these libraries are in doubt: it takes longest
            report = self.runtime.preload
            absent = [stem_of(library.soname) for library in report.missing] if report is not None else []
            in_doubt = any(stem.startswith(("libcudnn", "libcufft")) for stem in absent)
            in_doubt = in_doubt or (report is not None and bool(report.cudnn_mixed))
            operators = describe_model(self.outline).operators if in_doubt else frozenset()
        request = facts.Request(
            device=self.plan.device,
            cudnn_operators=operators_needing_cudnn(self.outline, operators),
            cufft_operators=placements.cufft_operators(operators),
            cudnn_disabled=self.plan.cudnn_disabled,
            collective_operators=read_collective_operators(self.outline),
        )
        self.depends_on_model = bool(request.cudnn_operators or request.cufft_operators or request.collective_operators)
        return diagnosing.why_unusable(self.runtime, request=request, cuda=self.cuda, cause=cause)
