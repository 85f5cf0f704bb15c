"""Open an InferenceSession on the GPU as planned, or raise the reason why it cannot be opened there.

The functions accept any instance of ``onnxruntime.InferenceSession`` under construction; the caller passes the original
constructor. ``onnxruntime`` must be imported already.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..environment.gpu.cuda import CudaState, context_error, context_is_active, initialise, is_older_than
from ..environment.libraries.loader import loader_of_this_process
from ..environment.packages.plugins import list_other_cuda_plugins, listed_providers, registered_library, takes_ordinal
from ..environment.ranks import LOCAL_RANKS
from ..errors import GPUError, InsufficientDeviceMemoryError, PoisonedContextError
from ..model.files import stamp_of
from ..model.outline import GraphOutline
from ..process.background import Task, is_of_a_handler
from ..process.late import late
from ..provider import lifetime, requests
from ..provider import placement as placements
from ..provider.devices import CPU as CPU_DEVICE
from ..provider.living import stacklevel
from ..provider.options import recording
from ..provider.placement import Placement
from ..provider.rank_devices import device_of_torch, local_rank_of_several, warning_of_rank
from ..provider.records import Found, VoidRecordError, find_record
from ..provider.runtime import Runtime, load_runtime, look_again, open_provider
from ..provider.settings import CAPTURE, DIMENSIONS, FLOAT16, LIMIT, THREADS
from ..provider.tensorrt import check_loadable, check_plugin
from . import other_plugins
from .allowed_cpu import explain_refused_placement, is_cpu_allowed, warn_of_cpu
from .budget import too_small
from .chosen import unfit
from .plan import STREAM, Opened, Plan, bind_gpu, cpu_plan, fit_to_model, plan_of, undiagnosed_for, why_untuned
from .plugin_limits import check_before_opening, check_before_running
from .request import SessionRequest, Verified
from .undiagnosed import UndiagnosedError, diagnose, explain

if TYPE_CHECKING:
    from ..diagnosis.checks import classifier
    from ..provider import float16
    from ..running import graph_requests
    from ..running.plain_runs import RunningSession
else:
    classifier = late("ortgpu.diagnosis.checks.classifier")
    float16 = late("ortgpu.provider.float16")
    graph_requests = late("ortgpu.running.graph_requests")

logger = logging.getLogger("ortgpu")

# Errors that do not depend on the model, by process, device, variables and files
_known: dict[tuple[Any, ...], GPUError] = {}
_MANY = 32
# Variables that the driver and the search for libraries read at each call, not only at the start of the process
_DECISIVE = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_HOME", "CUDA_PATH", "CUDNN_HOME",
    "CUDNN_PATH", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PATH",
)  # fmt: skip


class Ready(NamedTuple):
    """A GPU that sessions can be opened on: the plan for it, and the facts known about the process by then."""

    plan: Plan
    runtime: Runtime
    cuda: CudaState


def open_on_gpu(
    session: RunningSession,
    construct: Callable[..., None],
    request: SessionRequest,
    outline: GraphOutline,
    driver: Task[CudaState] | None = None,
) -> Opened:
    """Construct ``session`` on the GPU that the request names.

    ``construct`` is InferenceSession's own ``__init__``, bound to ``session``. ``outline`` is the outline of its model.
    ``driver`` is the initialisation of the driver, if it has begun.

    Raises:
        GPUError: the cause. The instance may be half made, and the caller must drop its attributes.
        Exception: ONNX Runtime's own, if the failure is not about the GPU.
    """
    for name in request.providers.repeated:
        warnings.warn(f"{name} is named more than once: the first counts", stacklevel=stacklevel(session))
    runtime = look_again()
    plan = plan_of(request, runtime)
    _raise_known_error(plan, runtime)
    ready = find_gpu(plan, runtime, driver, outline)
    _warn_of_rank(session, ready)
    check_context(ready, outline)
    ready = ready._replace(plan=_check_tensorrt(ready))
    check_before_opening(request, ready.runtime, outline)
    opened = open_as_chosen(session, construct, ready, outline)
    check_before_running(opened.placement, ready.runtime, outline)
    return opened


def open_on_cpu(
    session: RunningSession,
    construct: Callable[..., None],
    request: SessionRequest,
    outline: GraphOutline,
    error: GPUError,
) -> Verified:
    """Construct ``session`` on the CPU instead of raising ``error``. The caller allowed the CPU."""
    error.__traceback__ = None  # It refers to the session, and the warning keeps the error alive.
    verified = Verified(CPU_DEVICE, construct_session(session, construct, cpu_plan(request), outline), {})
    warn_of_cpu(session, error, request.model)  # The warning comes after opening: ONNX Runtime may refuse the model.
    return verified


def _raise_known_error(plan: Plan, runtime: Runtime) -> None:
    """Raise an earlier error again if the CPU is allowed instead, and the surroundings have not changed."""
    earlier_error = _known.get(_surroundings(plan, runtime)) if is_cpu_allowed(plan.request) else None
    if earlier_error is not None:
        raise lifetime.fresh_copy(earlier_error)


def find_gpu(plan: Plan, runtime: Runtime, driver: Task[CudaState] | None, outline: GraphOutline) -> Ready:
    """Return the plan for the requested GPU. Raises GPUError if this process cannot open sessions on it."""
    try:
        runtime, cuda = _working_driver(plan, runtime, driver)
        plan = bind_gpu(_use_torch_device(plan), cuda)
        report, capability = runtime.preload, plan.gpu.compute_capability
        provider = report.provider if report is not None else None
        has_code = provider is None or capability is None or provider.coverage(capability, os.environ) != "none"
        if has_code and (provider is None or not is_older_than(provider.cuda_major)):
            return Ready(plan, runtime, cuda)
        undiagnosed = undiagnosed_for(plan, runtime, cuda)
    except UndiagnosedError as failure:
        undiagnosed = failure.with_traceback(None)
    except GPUError as error:
        _remember(error, plan, runtime)
        raise
    diagnosed = diagnose(undiagnosed, outline)
    if not diagnosed.depends_on_model:
        _remember(diagnosed.error, plan, undiagnosed.runtime)
    raise diagnosed.error


def _remember(error: GPUError, plan: Plan, runtime: Runtime) -> None:
    """Keep an error for the next session that may run on the CPU instead."""
    if not is_cpu_allowed(plan.request):
        return
    if len(_known) >= _MANY:
        _known.clear()
    _known[_surroundings(plan, runtime)] = lifetime.fresh_copy(error)


def _use_torch_device(plan: Plan) -> Plan:
    """Return the plan of a rank with PyTorch's current device, if none was requested."""
    if not _may_be_rank(plan) or plan.request.is_guarded:
        return plan
    return plan if local_rank_of_several() is None else dataclasses.replace(plan, device=device_of_torch())


def _may_be_rank(plan: Plan) -> bool:
    """Return True if no device was requested, and a launcher may have started several processes on this host."""
    request = plan.request
    if plan.providers_in_options or request.device is not None or os.environ.keys().isdisjoint(LOCAL_RANKS):
        return False
    return not any("device_id" in options for options in request.providers.options.values())


def _warn_of_rank(session: RunningSession, ready: Ready) -> None:
    """Warn if several ranks open their sessions on GPU 0 because none of them names a device."""
    devices, plan = ready.cuda.devices, ready.plan
    if plan.gpu.ordinal != 0 or devices is None or len(devices) < 2 or not _may_be_rank(plan):
        return
    local_rank = local_rank_of_several()
    if local_rank:
        warnings.warn(warning_of_rank(local_rank), stacklevel=stacklevel(session))


def _working_driver(plan: Plan, runtime: Runtime, driver: Task[CudaState] | None) -> tuple[Runtime, CudaState]:
    """Return ONNX Runtime with its provider open, and the driver's answers.

    Raises UndiagnosedError or GPUError if the driver, the provider or its libraries do not work.
    """

    def ask() -> CudaState:
        return driver.result() if driver is not None else initialise()

    if requests.CUDA not in (runtime.available_providers or ()) and (others := list_other_cuda_plugins()):
        if plan.providers_in_options:
            return runtime, _check_driver(plan, runtime, ask())
        raise other_plugins.why_not_used(others)
    if requests.CUDA not in (runtime.available_providers or ()) or runtime.packages.onnxruntime.is_of_another_release:
        raise undiagnosed_for(plan, runtime)
    if runtime.cuda_is_plugin:  # A plugin ends the process if CUDA does not work.
        _check_driver(plan, runtime, ask())
    runtime = open_provider(register=not plan.request.is_guarded)
    report, refused = runtime.preload, runtime.provider_error is not None or runtime.plugin_problem is not None
    cuda = ask()
    if report is None or not report.ok or report.driver_missing or refused:
        raise undiagnosed_for(plan, runtime, cuda)
    return runtime, _check_driver(plan, runtime, cuda)


def _check_driver(plan: Plan, runtime: Runtime, cuda: CudaState) -> CudaState:
    if cuda.code == 0 and (cuda.devices is None or cuda.devices):
        return cuda
    raise lifetime.forked_error(cuda.code) or undiagnosed_for(plan, runtime, cuda)


def check_context(ready: Ready, outline: GraphOutline) -> None:
    """Make the context if there is none, and raise the error of its calls: a plugin would end the process for it."""
    plan = ready.plan
    if not ready.runtime.cuda_is_plugin:
        return
    is_known = not plan.providers_in_options or plan.device is not None
    ordinals = [plan.gpu.ordinal] if is_known else [gpu.ordinal for gpu in ready.cuda.devices or ()]
    for ordinal in ordinals:
        code = context_error(ordinal, is_opening=is_known)
        if code in (None, 0) or (code == lifetime.OUT_OF_MEMORY and not is_known):
            continue
        if code == lifetime.OUT_OF_MEMORY or context_is_active(ordinal) is False:
            cause = RuntimeError(f"CUDA failure {code}: no CUDA context for a session on cuda:{ordinal}")
            raise diagnose(undiagnosed_for(*ready, cause=cause), outline).error
        words = f"each call in this process's CUDA context on cuda:{ordinal} returns {code}"
        raise lifetime.noted(classifier.explain_run_code(code, words, None))


def _surroundings(plan: Plan, runtime: Runtime) -> tuple[Any, ...]:
    """Return the facts that decide whether the device can be used. Each session reads these facts again."""
    loaded = len(loader_of_this_process().handles), registered_library()
    requested = plan.device, plan.cudnn_disabled, plan.request.is_guarded
    # Each installation of a package adds its metadata to such a folder.
    packages = tuple(
        stamp_of(folder) for folder in map(str, sys.path) if folder.endswith(("site-packages", "dist-packages"))
    )
    return os.getpid(), requested, runtime.provider_stamp, packages, loaded, tuple(map(os.environ.get, _DECISIVE))


def _check_tensorrt(ready: Ready) -> Plan:
    """Return the plan without ordinals that a plugin of TensorRT does not take.

    Raises the error of a TensorRT provider, built in or of a plugin, that cannot be opened before CUDA.
    """
    plan = ready.plan
    for name in set(requests.TENSORRT).intersection(plan.providers.names):
        bridge = ready.runtime.packages.onnxruntime.bridge
        if name in listed_providers():
            check_plugin(name, plan.gpu)
            if not takes_ordinal(name):
                plan = plan.drop_ordinal(name)
        elif name == requests.TENSORRT[0] and bridge is not None:
            check_loadable(bridge)
    return plan


def open_as_chosen(
    session: RunningSession, construct: Callable[..., None], ready: Ready, outline: GraphOutline
) -> Opened:
    """Open the session with the options that suit its model, or without them."""
    plan = ready.plan
    if not (plan.request.is_guarded or plan.providers_in_options):
        opened = open_with_choices(session, construct, ready, outline)
        if opened is not None:
            return opened
    try:
        return Opened(plan, construct_session(session, construct, plan, outline), ready.runtime, ready.cuda)
    except Exception as cause:
        error = explain_refused_placement(cause) or _capture_refused(cause, session, construct, plan, outline)
        if error is None and (explained := explain(undiagnosed_for(*ready, cause=cause), outline)) is not None:
            error = explained.error
        if isinstance(error, InsufficientDeviceMemoryError) and plan.budget is not None and LIMIT in plan.chosen:
            error = too_small(error, plan.budget)
        if error is None or (isinstance(error, PoisonedContextError) and lifetime.gpu_works(plan.gpu.ordinal)):
            raise  # It is ONNX Runtime's own error, and not about the GPU.
        if context_is_active(plan.gpu.ordinal) is False:
            raise error from cause  # This process has no CUDA context to lose.
        raise lifetime.noted(error) from cause


def open_with_choices(
    session: RunningSession, construct: Callable[..., None], ready: Ready, outline: GraphOutline
) -> Opened | None:
    """Open the session with the options that suit its model.

    Return None if there are no such options, or if the session does not open with them.
    """
    plan = ready.plan
    record = _record_for(session, plan, outline)
    attempt = fit_to_model(plan, ready.runtime.release, outline, record)
    while attempt != plan:
        try:
            placement = construct_session(session, construct, attempt, outline)
        except Exception as refusal:  # A choice must not keep a session from opening.
            if is_of_a_handler(refusal):
                raise
            # Log the text alone: a handler may keep the error, and the error keeps the half-made session.
            logger.debug("a session does not open as chosen: %s", str(refusal))
            if record is not None:
                logger.warning("a session does not open with the record %s", record.path)
            return None
        is_current, dropped = outline.is_current, unfit(attempt.chosen, placement)
        if is_current and not dropped:
            return Opened(attempt, placement, ready.runtime, ready.cuda)
        # If the file has changed since, the options were chosen for another model.
        attempt = attempt.without(dropped) if is_current else plan
        for name in lifetime.HELD_BY_ONNXRUNTIME:  # Free this session first: the GPU may not have room for two.
            vars(session).pop(name, None)
    return None


def _record_for(session: RunningSession, plan: Plan, outline: GraphOutline) -> Found | None:
    """Return the record of tune that the session uses, if there is one. The log says why a record is not used."""
    tuned, refusal = plan.request.tuned, why_untuned(plan.request)
    record_path = None if isinstance(tuned, bool) or tuned == "now" else tuned
    if refusal is not None:
        if record_path is not None or tuned == "now":
            logger.warning("a session uses no record of tune: %s", refusal)
        return None
    record = _sound_record(plan, outline, record_path)
    if record is not None or tuned != "now":
        return record
    try:
        session._gpu_tune(plan.request.model, plan.gpu.ordinal)
    except Exception as error:  # A session opens without a record, too.
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


def construct_session(
    session: RunningSession, construct: Callable[..., None], plan: Plan, outline: GraphOutline
) -> Placement:
    """Call InferenceSession's constructor as planned. Return the placement."""
    request = plan.request
    model, options = request.model, recording(request.sess_options)
    if THREADS in plan.chosen:  # They are chosen only if the caller passed no SessionOptions.
        options.intra_op_num_threads = int(plan.chosen[THREADS][0])
    if DIMENSIONS in plan.chosen:
        for name, size in json.loads(plan.chosen[DIMENSIONS][0]).items():
            options.add_free_dimension_override_by_name(name, size)
    if FLOAT16 in plan.chosen:
        model = float16.convert_to_float16(request.model)
        outline = GraphOutline(model)
    arguments = _give_own_stream(session, plan).provider_arguments()
    construct(model, options, providers=arguments, enable_fallback=0, **request.others)
    if model is not request.model:
        in_bytes = isinstance(request.model, bytes)
        vars(session).update(  # The attributes name the caller's model, as if it had been passed.
            _model_path=None if in_bytes else os.fspath(request.model),
            _model_bytes=request.model if in_bytes else None,
        )
    return placements.read_placement(session, outline, without_options=request.sess_options is None)


def _give_own_stream(session: RunningSession, plan: Plan) -> Plan:
    """Give a plan that captures CUDA graphs a stream of its own. The stream of an earlier attempt is freed."""
    vars(session).pop("_stream", None)
    if not plan.captures:
        return plan
    session._stream = graph_requests.own_stream(plan.gpu.ordinal)
    if session._stream is None or load_runtime().cuda_is_plugin:
        return plan  # With the stream, a plugin of 1.31.1 begins each capture twice.
    return plan.replace_cuda_options({STREAM: str(session._stream.handle)})


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
        # This session only shows the placement.
        placement = construct_session(session, construct, plan.replace_cuda_options({CAPTURE: "0"}), outline)
    except Exception:  # noqa: BLE001 - the refusal stands, with fewer details
        placement = placements.UNKNOWN
    return graph_requests.why_not_captured(cause, placement, outline)
