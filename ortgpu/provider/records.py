"""Records of the settings that ``tune`` measured as best for a model on a GPU, kept in the user's cache folder.

A record is JSON. It is void if it has anything that this release does not know. It is also void if the graph, the
weights, the GPU, ONNX Runtime, the CUDA libraries or the driver have changed since the measurement.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environment.gpu.cuda import CudaDevice, count_multiprocessors
from ..environment.gpu.driver import read_driver_version
from ..environment.libraries.loader import loader_of_this_process
from ..model.files import ModelSource, is_ort_format, stamp_of
from ..model.outline import UNREADABLE, GraphOutline
from ..process.late import late
from ..process.temporary import make_own_folder
from .devices import Device
from .runtime import load_runtime, open_provider
from .settings import AUTOMATIC, SETTINGS, described, options_of

if TYPE_CHECKING:
    import tempfile

    import platformdirs
else:
    tempfile = late("tempfile")
    platformdirs = late("platformdirs")

logger = logging.getLogger("ortgpu")

_SCHEMA = 1
_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # opening a pipe does not wait
_LARGEST = 1 << 20  # bytes of a record
_LONGEST = 1 << 31  # dimensions are shorter


class VoidRecordError(ValueError):
    """A record cannot be used. The text of the error names the file and the reason."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings, and their time relative to plain ONNX Runtime's."""

    settings: Mapping[str, str]
    ratio: float


@dataclass(frozen=True, slots=True)
class Key:
    """Everything that a measurement depends on. None is unknown.

    Attributes:
        graph: digest of the model without its weights.
        weights: size and time of change of the weights' files. It is a digest of the weights if the model has no file
            or the record asks for float16.
        driver: the branch, such as "580".
        precision: the precision of plain ONNX Runtime.
    """

    graph: str
    weights: str
    onnxruntime: str
    gpu: str | None = None
    multiprocessors: int | None = None
    cuda: int | None = None
    cudnn: int | None = None
    cublas: int | None = None
    driver: str | None = None
    precision: str = "tf32"

    def difference(self, other: Key) -> str | None:
        """Return the first difference from ``other`` as text for a person. None: the keys are equal."""
        mine, theirs = asdict(self), asdict(other)
        return next(
            (f"{name} was {mine[name]}, and is {theirs[name]}" for name in mine if mine[name] != theirs[name]), None
        )


@dataclass(frozen=True, slots=True)
class Record:
    """The settings that were measured as best.

    Attributes:
        automatic: the best settings that a session may apply by itself.
        named: the best of all settings, for a caller that names the record.
        shapes: the shapes of the measured inputs, a mapping for each batch.
        dimensions: sizes of the free dimensions by their names, if there was one batch.
    """

    key: Key
    automatic: Choice
    named: Choice
    shapes: tuple[Mapping[str, list[int]], ...] = ()
    dimensions: Mapping[str, int] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the record so that a reader sees the old one or the new one. Raises OSError."""
        if path.is_symlink() and is_own(path.lstat()):  # the user's own link stays; another user's link is replaced
            path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump({"ortgpu tuning": _SCHEMA, **asdict(self)}, file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def read_record(path: str | os.PathLike[str], *, is_named: bool = False) -> Record:
    """Read a record. Unless the caller named it, it must be no link, and belong to this user or root.

    Raises:
        FileNotFoundError: there is none.
        VoidRecordError: it cannot be read, or holds something that this release does not know.
    """
    try:
        document = json.loads(_content(path, is_named=is_named))
    except (FileNotFoundError, VoidRecordError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise VoidRecordError(f"it cannot be read: {error}") from None
    if not isinstance(document, dict) or document.pop("ortgpu tuning", None) != _SCHEMA:
        raise VoidRecordError(f"it is no record of the form {_SCHEMA}")
    try:
        record = Record(**document)
        return replace(
            record,
            key=Key(**_checked(record.key, str, (str, int, type(None)))),
            automatic=_choice(record.automatic, AUTOMATIC),
            named=_choice(record.named, tuple(SETTINGS)),
            shapes=tuple(
                {
                    name: list(_sizes(dict(enumerate(shape)), int).values())
                    for name, shape in _checked(shapes, str, list).items()
                }
                for shapes in record.shapes
            ),
            dimensions=_sizes(record.dimensions, str),
        )
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise VoidRecordError(f"it has what this release does not know: {error}") from None


def _content(path: str | os.PathLike[str], *, is_named: bool) -> bytes:
    descriptor = os.open(path, _READ if is_named else _READ | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise VoidRecordError("it is no regular file")
        if not is_named and status.st_uid != 0 and not is_own(status):
            raise VoidRecordError(f"it belongs to another user, {status.st_uid}")
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise VoidRecordError(f"it is larger than {_LARGEST} bytes")
    return content


def is_own(status: os.stat_result) -> bool:
    """Return True if a file belongs to this user. Windows has permissions instead of owners."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _checked(found: Any, names: type, values: Any) -> dict[Any, Any]:
    if not isinstance(found, dict) or not all(isinstance(k, names) and isinstance(v, values) for k, v in found.items()):
        raise ValueError(f"{found!r}")
    return found


def _sizes(found: Any, names: type) -> dict[Any, int]:
    sizes: dict[Any, int] = _checked(found, names, int)
    if any(isinstance(size, bool) or not 0 <= size < _LONGEST for size in sizes.values()):
        raise ValueError(f"{found!r}")
    return sizes


def _choice(found: Any, allowed: tuple[str, ...]) -> Choice:
    choice = Choice(**_checked(found, str, (dict, float, int)))
    settings, ratio = _checked(choice.settings, str, str), float(choice.ratio)
    options_of(settings)
    if not set(allowed).issuperset(settings):
        raise ValueError(f"{settings!r}")
    if not math.isfinite(ratio) or ratio <= 0:
        raise ValueError(f"ratio {ratio!r}")
    return Choice(settings, ratio)


def default_path(model: ModelSource, gpu: str | None) -> Path | None:
    """Return the path of the record of a model for a kind of GPU. None if there is no folder: the log says why, once.

    The name of the record is a digest of the model's path, so a session without a record looks at one path only. For a
    model in bytes it is a digest of their size, beginning and end.
    """
    try:
        user_cache_path = platformdirs.user_cache_path  # the attribute imports the module
    except ImportError:  # a source tree on PYTHONPATH may lack dependencies
        return None
    if isinstance(model, bytes):
        name = b"%d" % len(model) + model[:_ENDS] + model[-_ENDS:]
    else:
        name = os.fsencode(os.path.abspath(os.fsdecode(model)))
    try:
        folder: Path = user_cache_path("ortgpu")
    except RuntimeError as error:  # The user has no entry in passwd, and HOME is not set.
        if not _told:
            _told.append(str(error))
            logger.warning("no record of tune is kept or used: %s", error)
        return None
    kind = re.sub(r"\W+", "-", gpu or "unknown").lower()
    return folder / "tuned" / f"{hashlib.sha256(name).hexdigest()[:24]}-{kind}.json"


def make_own_folders(folder: Path) -> None:
    """Make the folder of the default path and its parent. Raises OSError unless they are this user's alone.

    The folder of caches may be open to others.
    """
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_own_folder(folder.parent)
    make_own_folder(folder)


_ENDS = 4096  # bytes
_told: list[str] = []  # the reason for having no folder for records


def key_of(
    outline: GraphOutline, gpu: Device | CudaDevice | None, *, by_content: bool = False, weights: str | None = None
) -> Key:
    """Return the key of a model on a GPU, in this process. ``gpu`` None: on the CPU.

    If ``weights`` is passed, the files of weights are not read.

    Raises:
        VoidRecordError: the model cannot be read, or is in ONNX Runtime's own format.
    """
    model = outline.model
    if is_ort_format(model):
        raise VoidRecordError("the model is in ONNX Runtime's own format")
    try:
        content = outline.content
        graph = hashlib.sha256(repr((content.ir_version, content.opsets)).encode() + content.kept)
    except UNREADABLE as error:
        raise VoidRecordError(f"the model cannot be read: {error}") from None
    weights = _weights(outline, by_content=by_content) if weights is None else weights
    module = load_runtime().module
    build = getattr(module, "get_build_info", str)()
    key = Key(graph.hexdigest(), weights, f"{getattr(module, '__version__', None)} {build}")
    if gpu is None:
        return key
    report, loader = open_provider(register=False).preload, loader_of_this_process()

    def ask(stem: str, function: str) -> int | None:
        path = report.path_of(stem) if report is not None else None
        return loader.ask(path, function) if path is not None else None

    return replace(
        key,
        gpu=gpu.name,
        multiprocessors=count_multiprocessors(gpu.ordinal or 0),
        cuda=ask("libcublasLt", "cublasLtGetCudartVersion"),
        # libcudnn ends the process if it cannot open the part that answers.
        cudnn=ask("libcudnn", "cudnnGetVersion") if report is not None and report.cudnn is not None else None,
        cublas=ask("libcublasLt", "cublasLtGetVersion"),
        driver=(read_driver_version() or "").partition(".")[0] or None,
    )


def _weights(outline: GraphOutline, *, by_content: bool) -> str:
    """Return size and time of change of the files of weights, or a digest of their content.

    Raises:
        VoidRecordError: a file cannot be read as a whole.
    """
    model = outline.model
    if isinstance(model, bytes):
        return f"sha256 {hashlib.sha256(model).hexdigest()}"
    folder = os.path.dirname(os.path.abspath(os.fsdecode(model)))
    places = {(tensor.external or {}).get(b"location") for tensor in outline.graph.initializers}
    files = [os.fsdecode(model), *(os.path.join(folder, os.fsdecode(place)) for place in sorted(filter(None, places)))]
    if not by_content:
        stamps = (stamp_of(file) for file in files)
        return ", ".join(f"{stamp[2]} {stamp[3]}" if stamp is not None else "none" for stamp in stamps)
    digest = hashlib.sha256()
    try:
        for name in files:
            with open(os.open(name, _READ), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise VoidRecordError(f"the weights cannot be read: {name} is no regular file")
                while piece := file.read(1 << 22):
                    digest.update(piece)
    except OSError as error:
        raise VoidRecordError(f"the weights cannot be read: {error}") from None
    return f"sha256 {digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Found:
    """A valid record, and the choice in it for this caller."""

    path: Path
    record: Record
    choice: Choice

    @property
    def why(self) -> str:
        """The reason in ``options_chosen`` for each setting of the record."""
        return f"speed-up {1 / self.choice.ratio:.2f}, from {self.path}"


def find_record(
    outline: GraphOutline, gpu: Device | CudaDevice | None, named: str | os.PathLike[str] | None = None
) -> Found | None:
    """Return the record of a model on a GPU, or None if there is none. ``named`` is a path that the caller named.

    Raises:
        FileNotFoundError: the record that the caller named does not exist.
        VoidRecordError: the record cannot be used.
    """
    path = Path(named) if named is not None else default_path(outline.model, gpu.name if gpu is not None else None)
    if path is None or (named is None and not os.path.exists(path)):
        return None
    try:
        record = read_record(path, is_named=named is not None)
        weights = record.key.weights
        present = key_of(outline, gpu, weights=weights)
        if record.key == present:  # After another difference the weights need no reading.
            present = replace(present, weights=_weights(outline, by_content=str(weights).startswith("sha256")))
        difference = record.key.difference(present)
    except VoidRecordError as error:
        difference = str(error)
    if difference is not None:
        raise VoidRecordError(f"{path}: {difference}")
    return Found(path, record, record.named if named is not None else record.automatic)


def describe_record(
    model: ModelSource, gpu: Device | CudaDevice | None, chosen: Mapping[str, tuple[str, str]] | None = None
) -> str:
    """Return text for a person: the settings that sessions of a model apply by themselves, or why there are none.

    For an open session, ``chosen`` is its ``options_chosen``.
    """
    advice = "" if isinstance(model, bytes) else f": `ortgpu tune {shlex.quote(os.fsdecode(model))}`"
    try:
        match = find_record(GraphOutline(model), gpu)
    except VoidRecordError as error:
        return f"not tuned, because the record does not fit: {error}{advice}"
    if match is None:
        return f"not tuned{advice}"
    if chosen is not None and match.choice.settings and not any(why.endswith(match.why) for _, why in chosen.values()):
        return f"not tuned, because the session does not open with the record {match.path}"
    return (
        f"{described(match.choice.settings)} ({match.why})"
        if match.choice.settings
        else f"{described({})} (tuned; nothing faster), from {match.path}"
    )
