"""The records of the sessions in this process that a caller can ask for: model, device, placement, and creator."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from ..environment.packages.plugins import Arrival
from ..errors import ForkedSessionError, PoisonedContextError, escape_controls
from . import lifetime
from .devices import CPU as CPU_DEVICE
from .devices import Device
from .interfaces import Opened, Session
from .lifetime import Entry, SessionKind, device_of
from .placement import Placement, read_placement
from .requests import CPU, CUDA, TENSORRT
from .runtime import load_runtime


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The record of one session at the time of the call of :func:`sessions`.

    Attributes:
        model: path of the model file, or "<bytes>".
        device: the verified GPU, or the CPU; None if nothing was verified.
        providers: the bound providers, in order.
        placement: the nodes by provider; ``placement.known`` is False if ONNX Runtime recorded none.
        kind: "GPUSession", or "guarded" for an InferenceSession that the guard verified. "cpu" and "other" are sessions
            that the guard let pass, since they asked only for the CPU or only for other providers. "unguarded" is a
            session made without a guard, so nothing about it was verified.
        created_by: "file:line function" of the nearest caller outside onnxruntime, ortgpu and the session's own
            constructors; None if it is unknown, for an "unguarded" session.
        pid: the process that created it; None for an "unguarded" session without a known creator.
        alive: False for a session that only raises its error at every use. In a forked child this holds for the
            parent's sessions on a GPU, and after a sticky CUDA error for all verified sessions.
        fell_back: True for an "unguarded" session that asked for CUDA or TensorRT, or for nothing, and has neither. It
            is only known for sessions made after the first guard in this process and before ``ortgpu.uninstall()``.
            For other sessions it is False.
        arrival: ``arrival.way`` tells how CUDA reached ONNX Runtime, and ``arrival.library`` is the provider's file.
            None for a session that is not on CUDA.
    """

    model: str
    device: Device | None
    providers: tuple[str, ...]
    placement: Placement
    kind: SessionKind
    created_by: str | None
    pid: int | None
    alive: bool
    fell_back: bool = False
    arrival: Arrival | None = None

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in self.placement.by_provider.items())
        where = str(self.device) if self.device is not None else ", ".join(self.providers)
        return (
            f"{escape_controls(self.model)} on {where} [{self.kind}]"
            + (f", CUDA from a {self.arrival}" if self.arrival is not None and self.arrival.is_plugin else "")
            + (", fell back from CUDA" if self.fell_back else "")
            + (f", nodes: {counts}" if counts else "")
            + (f", created by {self.created_by}" if self.created_by else "")
            + ("" if self.alive else ", unusable")
        )


def register(session: Opened, kind: SessionKind = "GPUSession") -> None:
    """Remember ``session`` while it lives. An "unguarded" session is only listed: no guard verified it."""
    kind = "guarded" if getattr(type(session), "_guards", None) is not None else kind
    _, frame = _creator(session, sys._getframe(1))
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name) if frame is not None else None
    creator = f"{frame.f_code.co_filename}:{frame.f_lineno} {name}" if frame is not None else None
    lifetime.watch(session, kind, creator)


def attribute(session: Opened, to: Opened) -> None:
    """Record the creator of ``to`` for ``session``, too: it was opened in a thread without code of the caller."""
    lifetime.table[id(session)].created_by = lifetime.table[id(to)].created_by


def sessions() -> tuple[SessionRecord, ...]:
    """Return a record of every InferenceSession that this process holds open, in the order of creation.

    Closed sessions and garbage are left out. To find sessions made without a guard, this walks all objects of the
    interpreter and takes as long as a garbage collection, so it is meant for diagnosis. It does not see
    sessions of other processes, or of other languages in this process.
    """
    entries = list(lifetime.table.values())
    registered = [(session, entry.kind, entry) for entry in entries if (session := entry.session()) is not None]
    records = [_describe(session, kind, entry) for session, kind, entry in registered if kind and _is_open(session)]
    identities = {id(session) for session, *_ in registered}
    others = [instance for instance in _all_instances() if id(instance) not in identities and _is_open(instance)]
    return (*records, *(_describe(instance, "unguarded", None) for instance in others))


def _describe(session: Opened, kind: SessionKind, entry: Entry | None) -> SessionRecord:
    attributes = vars(session)
    providers = tuple(attributes.get("_providers") or ())
    device: Device | None
    try:
        device, placement = device_of(session), attributes["_verified"].placement
    except KeyError:
        device, placement = CPU_DEVICE if providers == (CPU,) else None, read_placement(session)
    path = attributes.get("_model_path")
    return SessionRecord(
        model=os.fsdecode(path) if path else "<bytes>",
        device=device,
        providers=providers,
        placement=placement,
        kind=kind,
        created_by=entry.created_by if entry is not None else None,
        pid=entry.pid if entry is not None else None,
        alive=lifetime.error_of(session) is None,
        fell_back=entry is not None and kind == "unguarded" and not {CUDA, *TENSORRT}.intersection(providers),
        arrival=load_runtime().arrival if CUDA in providers else None,
    )


def _is_open(session: Opened) -> bool:
    """Return True between the constructor and close(), while the object holds a session of ONNX Runtime."""
    error, attributes = lifetime.error_of(session), vars(session)
    if error is not None:
        return isinstance(error, (ForkedSessionError, PoisonedContextError)) and id(session) in lifetime.table
    if id(session) not in lifetime.table and hasattr(type(session), "_guards"):
        return False  # The GPUSession is not verified yet.
    # The constructor sets _providers after all other attributes of a record.
    return attributes.get("_sess") is not None and attributes.get("_providers") is not None


def _all_instances() -> list[Session]:
    home = "onnxruntime.capi.onnxruntime_inference_collection"  # "onnxruntime" may have a tracer's function
    root = getattr(sys.modules.get(home), "InferenceSession", None)
    if not isinstance(root, type):
        return []
    classes: list[type[Session]] = [root]
    for cls in classes:  # The list grows by subclasses of subclasses.
        classes += [child for child in cls.__subclasses__() if child not in classes]
    # isinstance() would wake lazy proxies and get the answers of their targets; type() does not.
    return [instance for instance in gc.get_referrers(*classes) if issubclass(type(instance), root)]


def stacklevel(session: object) -> int:
    """Return the stacklevel for a warning by the calling function that points to the creator of ``session``."""
    level, _ = _creator(session, sys._getframe(1))
    return level


def list_makers(session: object) -> list[str]:
    """Return the modules of a session's constructors and of their caller, without onnxruntime and ortgpu."""
    return [str(frame.f_globals.get("__name__", "")) for _, frame in _foreign_frames(session, sys._getframe(1))]


def _creator(session: object, start: FrameType) -> tuple[int, FrameType | None]:
    """Return distance and frame of the nearest caller outside onnxruntime, ortgpu and the constructors."""
    level, frame = 2, None
    for level, frame in _foreign_frames(session, start):  # noqa: B007 - the last one counts
        pass
    return (level, frame) if frame is not None and not _constructs(frame, session) else (2, None)


def _foreign_frames(session: object, start: FrameType) -> Iterator[tuple[int, FrameType]]:
    """Yield the frames outside onnxruntime and ortgpu with their distance, up to the first that is no constructor."""
    frame: FrameType | None = start
    level = 1
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("ortgpu", "onnxruntime"):
            yield level, frame
            if not _constructs(frame, session):
                return
        frame = frame.f_back
        level += 1


def _constructs(frame: FrameType, session: object) -> bool:
    """Return True if the frame is in a constructor, or __setstate__, of a subclass, for this very session."""
    code = frame.f_code
    if code.co_name not in ("__init__", "__setstate__") or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is session
