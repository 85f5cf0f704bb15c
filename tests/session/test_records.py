"""Records of ``tune``: what makes one void, and what sessions do with one."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest

from ortgpu import GPUSession
from ortgpu.environment.gpu.cuda import CudaDevice
from ortgpu.model.outline import GraphOutline
from ortgpu.provider import records
from ortgpu.provider.records import (
    Choice,
    Found,
    Key,
    Record,
    VoidRecordError,
    default_path,
    describe_record,
    find_record,
    key_of,
    make_own_folders,
    read_record,
)
from ortgpu.provider.requests import parse
from ortgpu.provider.settings import AUTOMATIC, DIMENSIONS, SETTINGS, options_of
from ortgpu.session.plan import bind_gpu, fit_to_model, plan_of, why_untuned
from ortgpu.session.request import SessionRequest
from tests.lab.fixtures import Lab
from tests.lab.stubs import GPU, Cuda
from tests.session.test_plan import GPUS, RUNTIME

CUDA = "CUDAExecutionProvider"
RELU = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }'
).SerializeToString()
LAST, BEST = {"layout": "channels-last"}, {"layout": "channels-last", "graph": "captured", "shapes": "fixed"}


posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files and owners")


def save_with_weights(path: Path, weights: Path) -> None:
    text = "g (float[n, 4] x) => (float[n, 4] y) { y = MatMul(x, w) }"
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    onnx.save(made, path, save_as_external_data=True, location=weights.name, size_threshold=0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "relu.onnx"
    path.write_bytes(RELU)
    return path


@pytest.fixture
def record(tmp_path: Path, model: Path) -> Path:
    """A record of the model, on no GPU."""
    path = tmp_path / "tuned" / "record.json"
    made = Record(key_of(GraphOutline(model), None), Choice(LAST, 0.8), Choice(BEST, 0.5), ({"x": [2, 4]},), {"n": 2})
    made.write(path)
    assert read_record(path) == made
    return path


def test_the_table_names_each_option_in_one_setting() -> None:
    options = {name: {option for each in SETTINGS[name].values() for option in each} for name in SETTINGS}
    assert sum(map(len, options.values())) == len(set().union(*options.values()))
    assert set(AUTOMATIC) < set(SETTINGS)
    fused = options_of({"layout": "channels-last, biases fused", "threads": "few", "staging": "pinned"})
    assert fused == {"prefer_nhwc": "1", "fuse_conv_bias": "1", "intra_op_num_threads": "4"}
    assert options_of({"depth": "two", "staging": "none"}) == {"map_depth": "2", "map_staging": "0"}
    # A fused bias without this layout gives wrong results.
    assert all("fuse_conv_bias" not in each or each["prefer_nhwc"] == "1" for each in SETTINGS["layout"].values())


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], object]:
    def change(document: dict[str, Any]) -> None:
        *inner, last = path
        for name in inner:
            document = document[name]
        document[last] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("ortgpu tuning", to=2),
        _set("more", to=1),
        _set("key", "more", to=1),
        _set("key", "gpu", to=["NVIDIA H200"]),
        _set("automatic", "provider_options", to={"gpu_external_alloc": "140737488"}),
        _set("automatic", "settings", "prefer_nhwc", to="1"),
        _set("automatic", "settings", "layout", to="diagonal"),
        _set("automatic", "settings", "layout", to=["channels-last"]),
        _set("automatic", "settings", "graph", to="captured"),  # which nobody gets who did not name the record
        _set("automatic", "ratio", to="0.8"),
        _set("automatic", "ratio", to=10**400),
        _set("named", "settings", "library", to="evil.so"),
        _set("named", to=None),
        _set("dimensions", "n", to="2"),
        _set("dimensions", "n", to=-1),
        _set("dimensions", "n", to=10**30),
        _set("dimensions", "n", to=True),
        _set("shapes", 0, "x", to=[-1, 4]),
        _set("shapes", 0, "x", to=["2", 4]),
        _set("automatic", "ratio", to=float("inf")),
        _set("named", "ratio", to=float("nan")),
        _set("named", "ratio", to=-0.5),
        _set("shapes", to=3),
        lambda document: document.pop("key"),
    ],
)
def test_what_this_release_does_not_know_voids_a_record(
    record: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    document = json.loads(record.read_text())
    change(document)
    record.write_text(json.dumps(document))
    with pytest.raises(VoidRecordError):
        read_record(record)


@pytest.mark.parametrize("text", ["", "[]", "1", "{", "\x00", "[" * 100_000])
def test_what_is_no_record(record: Path, text: str) -> None:
    record.write_text(text)
    with pytest.raises(VoidRecordError):
        read_record(record)


@posix
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "large", "device"])
def test_what_is_no_plain_file_of_this_user_is_void(record: Path, tmp_path: Path, kind: str) -> None:
    """A pipe hung every session of its model."""
    content = record.read_bytes()
    record.unlink()
    if kind == "pipe":
        os.mkfifo(record)
    elif kind == "folder":
        record.mkdir()
    elif kind == "large":
        record.write_bytes(content + b" " * (1 << 20))
    else:
        (tmp_path / "target").write_bytes(content)
        record.symlink_to(tmp_path / "target" if kind == "link" else "/dev/zero")
    with pytest.raises(VoidRecordError):
        read_record(record)
    if kind == "link":  # a caller may name one
        assert json.loads(content)["dimensions"] == read_record(record, is_named=True).dimensions


@posix
def test_the_record_of_another_user_is_void(record: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files to others: os.getuid() is not 0")
    os.chown(record, 65534, 65534)
    with pytest.raises(VoidRecordError, match="it belongs to another user, 65534"):
        read_record(record)
    assert read_record(record, is_named=True).dimensions == {"n": 2}


@posix
def test_a_link_of_another_user_is_not_written_through(record: Path, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files to others: os.getuid() is not 0")
    precious, made = tmp_path / "precious", read_record(record)
    precious.write_text("precious")
    record.unlink()
    record.symlink_to(precious)
    os.lchown(record, 65534, 65534)
    made.write(record)
    assert precious.read_text() == "precious"
    assert read_record(record) == made


@posix
def test_folders_of_records_are_of_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "ortgpu" / "tuned"
    make_own_folders(folder)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)] == [0o700, 0o700]
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not this user's alone"):
        make_own_folders(folder)
    if os.getuid() == 0:
        folder.unlink()
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        with pytest.raises(OSError, match="not this user's alone: owner 65534"):
            make_own_folders(folder)


@posix
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_weights_without_an_end_void_a_record(tmp_path: Path, kind: str) -> None:
    """They hung each session of a model with a record of float16."""
    model, weights = tmp_path / "model.onnx", tmp_path / "weights.bin"
    save_with_weights(model, weights)
    made = key_of(GraphOutline(model), None, by_content=True)
    Record(made, Choice({}, 1.0), Choice({}, 1.0)).write(tmp_path / "record.json")
    weights.unlink()
    if kind == "pipe":
        os.mkfifo(weights)
    else:
        weights.symlink_to("/dev/zero")
    with pytest.raises(VoidRecordError, match=r"weights\.bin"):
        find_record(GraphOutline(model), None, tmp_path / "record.json")


def test_the_graph_is_compared_before_the_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = tmp_path / "model.onnx", tmp_path / "weights.bin"
    save_with_weights(model, weights)
    made = replace(key_of(GraphOutline(model), None, by_content=True), graph="another")
    Record(made, Choice({}, 1.0), Choice({}, 1.0)).write(tmp_path / "record.json")
    weights.unlink()
    with pytest.raises(VoidRecordError, match="graph was another"):
        find_record(GraphOutline(model), None, tmp_path / "record.json")


def test_a_user_without_a_home_has_no_records(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service without an entry in passwd got a bare RuntimeError from each session."""
    if sys.platform == "win32":
        pytest.skip("Windows knows the folder of each user: sys.platform")
    import pwd

    def nobody(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(records, "_told", [])
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        assert find_record(GraphOutline(model), None) is None
        assert default_path(model, None) is None
    (logged,) = [each.getMessage() for each in caplog.records]
    assert logged.startswith("no record of tune is kept or used: ")


def test_a_record_is_found_for_its_model_alone(record: Path, model: Path) -> None:
    def found() -> Found | None:
        return find_record(GraphOutline(model), None, record)

    assert found() == Found(record, read_record(record), Choice(BEST, 0.5))
    os.utime(model, ns=(1, 1))
    with pytest.raises(VoidRecordError, match="weights was"):
        found()
    model.write_bytes(RELU.replace(b"Relu", b"Tanh"))
    with pytest.raises(VoidRecordError, match="graph was"):
        found()
    record.unlink()
    with pytest.raises(FileNotFoundError):
        found()


def test_bytes_are_known_by_their_content(record: Path) -> None:
    key = key_of(GraphOutline(RELU), None)
    assert key.weights.startswith("sha256 ")
    assert key_of(GraphOutline(RELU + b""), None) == key
    assert key.difference(Key("other", key.weights, key.onnxruntime)) == f"graph was {key.graph}, and is other"
    for other in (b"ORTMORTM", b"none"):
        with pytest.raises(VoidRecordError):
            key_of(GraphOutline(other), None)


PLACE: dict[str, Any] = {
    "graph": "a graph",
    "weights": "sha256 1",
    "onnxruntime": "1.31.1",
    "gpu": "NVIDIA H200",
    "multiprocessors": 132,
    "cuda": 13000,
    "cudnn": 91000,
    "cublas": 130000,
    "driver": "580.65.06",
    "precision": "tf32",
}


@pytest.mark.parametrize("name", PLACE)
def test_a_record_is_for_one_model_one_gpu_and_the_releases_that_it_was_measured_with(name: str) -> None:
    here = Key(**PLACE)
    assert here.difference(Key(**PLACE)) is None
    for other in ("other", None):
        assert here.difference(Key(**{**PLACE, name: other})) == f"{name} was {PLACE[name]}, and is {other}"


def test_a_record_is_written_as_a_whole_or_not_at_all(record: Path) -> None:
    beyond: Any = object()  # JSON
    before, broken = record.read_bytes(), replace(read_record(record), dimensions={"n": beyond})
    with pytest.raises(TypeError):
        broken.write(record)
    assert record.read_bytes() == before
    assert list(record.parent.iterdir()) == [record]


def test_a_link_to_a_record_stays(record: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest.json"
    link.symlink_to(record)
    made = replace(read_record(record), automatic=Choice({}, 1.0))
    made.write(link)
    assert link.is_symlink()
    assert read_record(record) == made


def test_weights_beside_the_model_are_part_of_its_content(tmp_path: Path) -> None:
    """A record of float16 was used for weights that it was not compared with."""
    path, weights = tmp_path / "model.onnx", tmp_path / "weights.bin"
    save_with_weights(path, weights)
    keys = []
    for value in (1, 1, 2):
        weights.write_bytes(np.full((4, 4), value, np.float32).tobytes())
        keys.append(key_of(GraphOutline(path), None, by_content=True))
    assert keys[0] == keys[1]
    assert str(keys[1].difference(keys[2])).startswith("weights was sha256 ")
    weights.unlink()
    with pytest.raises(VoidRecordError, match=r"weights\.bin"):
        key_of(GraphOutline(path), None, by_content=True)


def test_without_a_record_a_session_pays_one_look(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, outline = default_path(model, "NVIDIA H200"), GraphOutline(model)
    looks: list[Any] = []

    def looking(name: Any, *_: Any) -> Any:
        looks.append(name)
        raise FileNotFoundError

    with monkeypatch.context() as watched:
        watched.setattr(os, "stat", looking)
        watched.setattr("builtins.open", looking)
        assert find_record(outline, CudaDevice(0, None, "NVIDIA H200", None, None, None)) is None
    assert looks == [path]


def test_the_usual_place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path(str(model), "NVIDIA H200")
    assert path is not None
    assert path.parent == tmp_path / "ortgpu" / "tuned"
    assert path.name.endswith("-nvidia-h200.json")
    assert path == default_path(model, "NVIDIA H200")
    others = {default_path(model, "NVIDIA A100"), default_path(b"1", None), default_path(b"2", None), path}
    assert len(others) == 4
    assert find_record(GraphOutline(model), None) is None


def test_a_session_that_does_not_open_with_its_record_is_not_called_tuned(
    record: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "default_path", lambda *_: record)
    text = describe_record(model, None)
    assert text == f"layout channels-last (speed-up 1.25, from {record})"
    chosen = {"prefer_nhwc": ("1", f"layout channels-last: speed-up 1.25, from {record}")}
    assert describe_record(model, None, chosen) == text
    assert describe_record(model, None, {}) == f"not tuned, because the session does not open with the record {record}"


# Plans


def planned(found: Found, providers: Any = None, **arguments: Any) -> Any:
    request = SessionRequest(RELU, providers=parse(providers, None), **arguments)
    return fit_to_model(bind_gpu(plan_of(request, RUNTIME), GPUS), (1, 31), GraphOutline(RELU), found)


def test_a_plan_has_what_the_record_says(record: Path) -> None:
    made = read_record(record)
    plan = planned(Found(record, made, made.automatic))
    value, why = plan.chosen["prefer_nhwc"]
    assert value == "1"
    assert why == f"layout channels-last: speed-up 1.25, from {record}"
    plan = planned(Found(record, made, made.named))
    assert dict(plan.provider_arguments())[CUDA]["enable_cuda_graph"] == "1"
    assert "free_dimension_overrides" not in dict(plan.provider_arguments())[CUDA]
    assert json.loads(plan.chosen[DIMENSIONS][0]) == {"n": 2}
    plan = planned(Found(record, made, Choice({"depth": "two", "staging": "none"}, 0.8)))
    assert {name: plan.chosen[name][0] for name in ("map_depth", "map_staging")} == {
        "map_depth": "2",
        "map_staging": "0",
    }
    assert not {"map_depth", "map_staging"} & dict(plan.provider_arguments())[CUDA].keys()


def test_options_of_the_caller_win(record: Path) -> None:
    made = read_record(record)
    found = Found(record, made, Choice({**LAST, "search": "exhaustive"}, 0.8))
    plan = planned(found, [(CUDA, {"fuse_conv_bias": "0"})])
    assert "prefer_nhwc" not in plan.chosen
    assert plan.chosen["cudnn_conv_algo_search"][0] == "EXHAUSTIVE"
    found = Found(record, made, Choice({"graph": "captured"}, 0.8))
    assert "enable_cuda_graph" in planned(found).chosen
    for own in ("enable_cuda_graph", "user_compute_stream"):  # a captured session has a stream of its own
        assert "enable_cuda_graph" not in planned(found, [(CUDA, {own: "0"})]).chosen


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, None),
        ({"tuned": False}, "was not to choose"),
        ({"is_guarded": True}, "was not to choose"),
        ({"sess_options": object()}, "SessionOptions"),
        ({"others": {"disabled_optimizers": []}}, "further arguments"),
        ({"providers": parse([(CUDA, {"use_tf32": 0})], None)}, "use_tf32=0"),
        ({"providers": parse(["TensorrtExecutionProvider", CUDA], None)}, "other providers"),
    ],
)
def test_who_uses_no_record(arguments: dict[str, Any], why: str | None) -> None:
    found = why_untuned(SessionRequest("model.onnx", **arguments))
    assert (found is None) if why is None else (why in str(found))


@pytest.mark.parametrize("tuned", [None, 1.5, "missing.json"])
def test_what_the_argument_cannot_be(tuned: Any) -> None:
    with pytest.raises((TypeError, FileNotFoundError), match=r"tuned must be|missing\.json"):
        GPUSession(RELU, tuned=tuned)


def test_a_session_applies_its_record_and_says_so(lab: Lab, tmp_path: Path) -> None:
    """With a stub driver: the options are watched on their way to ONNX Runtime."""
    machine = lab.machine(cuda=Cuda(devices=(GPU(),)))
    program = "session.records.a_session_applies_its_record_and_says_so"
    found = machine.run_program(program, str(lab.models.relu), str(tmp_path)).ok().json
    untuned = found["untuned"]
    assert found["tuned"] == {**untuned, "prefer_nhwc": "1"}
    first, second = found["refused"]  # a record must not keep a session from opening
    assert (first, second) == (found["tuned"], {"cudnn_conv_algo_search": "HEURISTIC"})
    assert found["its own"] == {**untuned, "prefer_nhwc": "0"}
    assert found["named"] == {**untuned, "cudnn_conv_algo_search": "EXHAUSTIVE"}
    assert found["declined"] == found["gone"] == found["void"] == untuned
    assert len(found["said"]) == 1
    assert "what this release does not know" in found["said"][0]
    assert found["now"] == found["at once"] == found["tuned"]
    assert found["searched"] == [[str(lab.models.relu), 0]], "there is a record from then on"


def test_what_changes_the_precision_is_tuned_only_where_it_is_named() -> None:
    assert {*AUTOMATIC} == {"layout", "search", "workspace", "cudnn", "threads", "depth", "staging"}
