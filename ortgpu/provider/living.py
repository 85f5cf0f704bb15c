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
        placement: the nodes by provider; ``placement.known`` is False if ONNX Runtime did not record them.
        kind: "GPUSession", or "guarded" for an InferenceSession that the guard verified. "cpu" and "other" are sessions
            that the guard let pass, since they asked only for the CPU or only for other providers. "unguarded" is a
            session made without a guard, so nothing about it was verified.
        created_by: "file:line function" of the nearest caller outside onnxruntime, ortgpu and the session's own
            constructors; None if it is unknown, for an "unguarded" session.
        pid: the process that created it; None in the same case.
        alive: False for a session of which only the error that its use raises is left: in a forked child those of its
            parent that are on a GPU, and after a sticky CUDA error all that were verified.
        fell_back: True for an "unguarded" session that asked for CUDA or TensorRT, or for nothing, and has neither. It
            is only known for sessions made after a guard was first in force in this process, until
            ``ortgpu.uninstall()``. For others it is False.
        arrival: the way by which CUDA reached ONNX Runtime, as ``arrival.way``, and the provider's file, as
            ``arrival.library``; None for a session that is not on CUDA.
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
    """Remember ``session`` while it lives. "unguarded": it asked for what a guard verifies, and is only listed."""
    kind = "guarded" if getattr(type(session), "_guards", None) is not None else kind
    lifetime.watch(session, kind, _creator_of(session))


def attribute(session: Opened, to: Opened) -> None:
    """Record the creator of ``to`` as that of ``session``, too: a thread opened it, in which no caller's code is."""
    lifetime.table[id(session)].created_by = lifetime.table[id(to)].created_by


def sessions() -> tuple[SessionRecord, ...]:
    """Return a record of every InferenceSession that this process holds open, in the order of creation.

    Closed sessions and garbage are left out. To find sessions made without a guard, this walks all objects of the
    interpreter and takes as long as a garbage collection, so use it for diagnosis, not in a loop. It does not see
    sessions of other processes, or of other languages in this process.
    """
    entries = list(lifetime.table.values())
    known = [(session, entry.kind, entry) for entry in entries if (session := entry.session()) is not None]
    records = [_describe(session, kind, entry) for session, kind, entry in known if kind and _is_open(session)]
    seen = {id(session) for session, *_ in known}
    others = [found for found in _all_instances() if id(found) not in seen and _is_open(found)]
    return (*records, *(_describe(found, "unguarded", None) for found in others))


def _describe(session: Opened, kind: SessionKind, entry: Entry | None) -> SessionRecord:
    held = vars(session)
    providers = tuple(held.get("_providers") or ())
    device: Device | None
    try:
        device, placement = device_of(session), held["_verified"].placement
    except KeyError:
        device, placement = CPU_DEVICE if providers == (CPU,) else None, read_placement(session)
    path = held.get("_model_path")
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
    """Return True if there is a session of ONNX Runtime in it: after the constructor and before close()."""
    error, held = lifetime.error_of(session), vars(session)
    if error is not None:
        return isinstance(error, (ForkedSessionError, PoisonedContextError)) and id(session) in lifetime.table
    if id(session) not in lifetime.table and hasattr(type(session), "_guards"):
        return False  # a GPUSession that is not verified yet
    # _providers comes after all of which a record is made
    return held.get("_sess") is not None and held.get("_providers") is not None


def _all_instances() -> list[Session]:
    home = "onnxruntime.capi.onnxruntime_inference_collection"  # "onnxruntime" may have a function of a tracer's
    root = getattr(sys.modules.get(home), "InferenceSession", None)
    if not isinstance(root, type):
        return []
    classes: list[type[Session]] = [root]
    for cls in classes:  # grows: subclasses of subclasses
        classes += [child for child in cls.__subclasses__() if child not in classes]
    # by type(), not isinstance(): that would wake lazy proxies, which answer for what they stand for
    return [found for found in gc.get_referrers(*classes) if issubclass(type(found), root)]


def stacklevel(session: object) -> int:
    """Return the stacklevel of a warning by the calling function that is to point to the creator of ``session``."""
    level, _ = _creator(session, sys._getframe(1))
    return level


def _creator_of(session: object) -> str | None:
    _, frame = _creator(session, sys._getframe(1))
    if frame is None:
        return None
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} {getattr(code, 'co_qualname', code.co_name)}"


def list_makers(session: object) -> list[str]:
    """Return the modules outside onnxruntime and ortgpu that make a session: of its constructors and their caller."""
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
