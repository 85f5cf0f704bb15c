"""Make the sessions that keep the plans of several shapes, see :mod:`ortgpu.running.shape_plans`.

They open the model as ONNX Runtime has optimised it for the GPU, without further optimisations. So they have the fused
nodes and folded weights of the first session. A temporary session writes the optimised model into a temporary folder.
The weights stay in a file of their own, so the size of the model does not matter.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..model.files import ModelSource, is_ort_format, stamp_of
from ..process.late import late
from ..process.temporary import private_folder
from ..provider.devices import Device, free_memory
from ..provider.options import Carried, carries_providers, recording_options
from ..provider.placement import Placement, has_convolutions, read_placement
from ..provider.requests import CPU, CUDA
from ..provider.settings import CAPTURE, DIMENSIONS, FLOAT16, LIMIT, ONE_STREAM, SESSION_SETTINGS
from ..running.cudart import runtime_of
from ..running.memory import holdings_of
from ..running.plain_runs import PlainRunner
from ..running.staging import StagedRunner
from .plan import STREAM
from .request import SessionRequest, Verified

if TYPE_CHECKING:
    from ..model import branches as graph_branches
    from ..running import shape_plans
    from ..running.plain_runs import RunningSession
    from ..running.shape_plans import Lane, ShapePlans
else:
    shape_plans = late("ortgpu.running.shape_plans")
    graph_branches = late("ortgpu.model.branches")

# The plans of a session may take this part of the memory that is free when they are made.
PART_OF_FREE_MEMORY = 0.5

_IN_A_FILE_FROM = 1024  # Weights of so many bytes and more are in a file.


class NoPlansError(Exception):
    """A session can have no plans for several shapes; the message says why."""


@dataclass(frozen=True, slots=True)
class PlanSource:
    """The facts that plans are made from. It does not refer to the session, so it does not keep an unused session.

    Attributes:
        stamp: the stamp of the model's file. After a replacement the file has another stamp.
        sizes: the sizes of fixed free dimensions, by name.
        overridable: the initialisers that a run may replace.
        staged: True if runs with large arrays copy in threads.
        most: the bytes of a budget that the plans may take; None: half of the GPU's free memory.
    """

    model: ModelSource
    stamp: tuple[int, ...] | None
    options: Carried
    cuda_options: Mapping[str, str]
    others: Mapping[str, Any]
    sizes: Mapping[str, int]
    device: Device
    placement: Placement
    overridable: tuple[str, ...]
    pinned_memory_limit: int
    staged: bool
    most: int | None = None

    def make(self, branches: int) -> ShapePlans:
        """Return plans for so many shapes.

        Raises:
            NoPlansError: the model does not allow it, or the GPU has no room.
            Exception: ONNX Runtime's own.
        """
        opening: Callable[[int], Any] = functools.partial(self._opening, branches)
        if self.most is not None:
            opening = functools.partial(_refuse, "a budget has no room for their streams and handles beside the arena")
        with self._opening(branches) as (_, open_lane):
            return shape_plans.ShapePlans(open_lane(), opening)

    def _device_guard(self) -> contextlib.AbstractContextManager[None]:
        """Return a guard for this thread: memory for a session must not spoil a graph that another one captures."""
        runtime = runtime_of(self.device) if self.device.is_gpu else None
        return runtime.device_guard() if runtime is not None else contextlib.nullcontext()

    def _check_file(self) -> None:
        if not isinstance(self.model, bytes) and stamp_of(self.model) != self.stamp:
            raise NoPlansError("the model's file has changed since the session was opened")

    @contextlib.contextmanager
    def _opening(self, branches: int, further: int = 0) -> Iterator[tuple[int, Callable[[], Lane]]]:
        """Prepare the first session with branches, or so many further ones, or as many as the GPU has room for.

        Give their number, and the function that opens one. Threads may call it. Both raise as :meth:`make` does.
        """
        with private_folder("ortgpu-shapes-") as folder:
            with self._device_guard():
                path, size = self._optimised(folder)
            selectors, copied = _rewritten(path, branches, self.overridable)
            size += branches * copied
            room = room_for(self.device, size, self.most)
            count = max(1, further)
            if room is not None:
                count = max(1, min(count, room // max(1, 2 * size)))
                room //= count
            options = self._new_options()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.enable_mem_pattern = False  # A pattern for each shape takes more memory than it saves.
            if not self.placement.cpu_compute_nodes:
                options.intra_op_num_threads = 1  # No node needs more threads.
            elif further:  # Threads that look out for work would take the cores from the threads of other lanes.
                options.add_session_config_entry("session.intra_op.allow_spinning", "0")

            def open_lane() -> Lane:
                with self._device_guard():
                    session = shape_plans.FurtherSession(
                        self.device,
                        self.pinned_memory_limit,
                        path,
                        options,
                        providers=self._providers(room),
                        enable_fallback=0,
                    )
                if not further:
                    self._check_placement(session, branches)
                runner = StagedRunner(session) if self.staged else PlainRunner(session)
                return shape_plans.Lane(session, runner, selectors, branches)

            yield count, open_lane

    def _optimised(self, folder: str) -> tuple[str, int]:
        """Write the optimised model. Return its path and the bytes of its weights."""
        path = os.path.join(folder, "model.onnx")
        options = self._new_options()
        options.optimized_model_filepath = path
        for name, value in ("file_name", "weights"), ("min_size_in_bytes", str(_IN_A_FILE_FROM)):
            options.add_session_config_entry(f"session.optimized_model_external_initializers_{name}", value)
        for name, size in self.sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        in_file = not isinstance(self.model, bytes)
        model = os.fspath(self.model) if in_file else self.model
        self._check_file()
        session = native.InferenceSession(options, model, in_file, False)
        providers = self._providers(None)
        names = [name for name, _ in providers]
        disabled = set(self.others.get("disabled_optimizers", ()))
        session.initialize_session(names, [settings for _, settings in providers], disabled)
        del session
        self._check_file()
        weights = os.path.join(folder, "weights")
        return path, os.path.getsize(weights) if os.path.exists(weights) else 0

    def _new_options(self) -> Any:
        options = recording_options() if self.options.options is None else self.options.copied()
        options.enable_profiling = False
        options.log_severity_level = max(3, options.log_severity_level)  # The first session has logged the warnings.
        return options

    def _providers(self, limit: int | None) -> list[tuple[str, dict[str, str]]]:
        if not self.device.is_gpu:
            return [(CPU, {})]
        options = dict(self.cuda_options)
        if limit is not None:
            options["gpu_mem_limit"] = str(limit)
            options[ONE_STREAM] = "1"  # See shape_plans.OneAtATime.
            options["prefer_nhwc"] = "0"  # The model has the layout already.
        return [(CUDA, options), (CPU, {})]

    def _check_placement(self, session: Any, branches: int) -> None:
        """Raise NoPlansError if more nodes are on the CPU than in so many copies of the first session."""
        if not self.device.is_gpu:
            return
        placement = read_placement(session, without_options=True)
        moved = len(placement.cpu_compute_nodes) - branches * len(self.placement.cpu_compute_nodes)
        if not placement.known or moved > 0:
            raise NoPlansError("ONNX Runtime would compute other nodes of it on the CPU")


def maker_of(
    session: RunningSession, request: SessionRequest, verified: Verified, *, staged: bool
) -> Callable[[int], ShapePlans] | None:
    """Return the function that makes plans for an open session. None if the session needs none.

    The function raises NoPlansError for a session that would need plans and can have none.
    """
    if request.is_guarded or not has_convolutions(verified.placement) or not _has_free_shapes(session):
        return None
    refusal = _refusal(session, request, verified)
    if refusal is not None:
        return functools.partial(_refuse, refusal)
    options, ordinal = verified.options_chosen, verified.device.ordinal
    of_cuda = {name: value for name, (value, _) in options.items() if name not in SESSION_SETTINGS}
    return PlanSource(
        model=request.model,
        stamp=session._model_stamp,
        options=Carried(request.sess_options, request.make_options),
        cuda_options={
            **request.providers.options_of(CUDA),
            **of_cuda,
            **({"device_id": str(ordinal)} if ordinal else {}),
        },
        others=request.others,
        sizes=json.loads(options[DIMENSIONS][0]) if DIMENSIONS in options else {},
        device=verified.device,
        placement=verified.placement,
        overridable=tuple(initialiser.name for initialiser in session._overridable_initializers),
        pinned_memory_limit=session._pinned_memory_limit,
        staged=staged,
        most=holdings_of(session).room,
    ).make


def _refusal(session: RunningSession, request: SessionRequest, verified: Verified) -> str | None:
    """Return why a session can have no plans, as far as it is known before they are made."""
    options = request.providers.options_of(CUDA)
    if not {CUDA, CPU}.issuperset(session._sess.get_providers()):
        return "it has other providers than CUDA"
    if carries_providers(request.sess_options):
        return "its SessionOptions carry its providers"
    if LIMIT in options:
        return f"the caller set {LIMIT}"
    if holdings_of(session).room == 0:
        return "its budget of GPU memory leaves no room"
    for name in (CAPTURE, STREAM):
        if options.get(name, "0").lower() not in ("0", "false"):
            return f"the caller set {name}"
    if is_ort_format(request.model):
        return "its model is in ONNX Runtime's own format"
    if FLOAT16 in verified.options_chosen:
        return "its record of tune converts the model"
    return None


def _refuse(why: str, _count: int) -> NoReturn:
    raise NoPlansError(why)


def room_for(device: Device, weights: int, most: int | None = None) -> int | None:
    """Return the bytes of the GPU that the plans of a session may take. Raises NoPlansError if there is no room.

    Args:
        weights: bytes of the weights. The weights are on the GPU once more.
        most: bytes of a budget.
    """
    if not device.is_gpu:
        return None
    free = free_memory(device.uuid) if device.uuid is not None else None
    if free is None:
        raise NoPlansError("the GPU's free memory is unknown")
    room = int(free * PART_OF_FREE_MEMORY) if most is None else min(free, most)
    if room < 2 * weights:
        raise NoPlansError(
            f"their weights take {weights >> 20} MiB, and plans get {room >> 20} MiB"
            + (", half of the GPU's free memory" if most is None else "")
        )
    return room


def _rewritten(path: str, branches: int, overridable: tuple[str, ...]) -> tuple[list[str], int]:
    """Rewrite the file of a model as one with branches. Return its selectors, and the bytes that each branch copies."""
    model, selectors, copied = graph_branches.build_branches(graph_branches.read_model(path), branches, overridable)
    with open(path, "wb") as file:
        file.write(model.SerializeToString())
    return selectors, copied


def _has_free_shapes(session: RunningSession) -> bool:
    try:
        return any(not isinstance(size, int) for value in session._sess.inputs_meta for size in value.shape)
    except UnicodeDecodeError:  # A name of a dimension is not UTF-8.
        return False
