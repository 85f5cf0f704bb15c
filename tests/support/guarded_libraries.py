"""Real libraries that make ONNX Runtime sessions of their own, each used as its documentation says, with a small model.

Started as ``guarded_libraries.py LIBRARY MODE FOLDER``, in an environment that has them. Modes: "plain", nothing is
guarded; "before" and "after", the guard is installed before or after the library is imported; "verified", as "after",
and a GPU is pretended to be there. The report: what the sessions are on, or the error.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.guarded_programs import listed, pretend_gpu, report

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


# Models: the smallest that a library takes


def save(path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], *tensors: Any) -> Path:
    import onnx
    from onnx import helper

    kinds = {"x": onnx.TensorProto.FLOAT}
    graph = helper.make_graph(
        nodes,
        "small",
        [
            helper.make_tensor_value_info(name, kinds.get(name, onnx.TensorProto.INT64), shape)
            for name, shape in inputs.items()
        ],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        list(tensors),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path


def mask_model(path: Path) -> Path:
    """An image, to the mean of its channels."""
    from onnx import helper

    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=[1], keepdims=1)
    return save(path, [node], {"x": ["n", 3, 320, 320]}, {"y": ["n", 1, 320, 320]})


def face_model(path: Path) -> Path:
    """A face, to three numbers."""
    from onnx import helper

    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Flatten", ["p"], ["y"])]
    return save(path, nodes, {"x": ["n", 3, 112, 112]}, {"y": ["n", 3]})


def text_model(path: Path) -> Path:
    """A text, to a row of a table for each token; with the files of a tokenizer beside it."""
    from onnx import TensorProto, helper

    table = helper.make_tensor("table", TensorProto.FLOAT, [4, 2], [0.1 * number for number in range(8)])
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["last_hidden_state"]),
    ]
    last = helper.make_tensor("last", TensorProto.INT64, [1], [-1])
    shape = ["batch_size", "sequence_length"]
    inputs, outputs = {"input_ids": shape, "attention_mask": shape}, {"last_hidden_state": [*shape, 2]}
    save(path, nodes, inputs, outputs, table, last)
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "hello": 2, "world": 3}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 16,
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
        },
        "config.json": {"model_type": "bert", "hidden_size": 2, "num_attention_heads": 1, "pad_token_id": 0},
    }
    for name, content in files.items():
        (path.parent / name).write_text(json.dumps(content), encoding="utf-8")
    return path


# Libraries: import it, then a function that makes it make its sessions, and uses them. Their sessions are kept alive.

kept: list[Any] = []


def rembg(folder: Path) -> Callable[[], object]:
    library: Any = importlib.import_module("rembg")
    image: Any = importlib.import_module("PIL.Image")

    def use() -> object:
        model = mask_model(folder / "mask.onnx")  # REMBG_HOME is that folder
        kept.append(library.new_session("u2net_custom", model_path=str(model)))
        picture = image.effect_noise((64, 48), 50).convert("RGB")
        return library.remove(picture, session=kept[-1], only_mask=True).size

    return use


def rapidocr(_folder: Path) -> Callable[[], object]:
    library: Any = importlib.import_module("rapidocr")

    def use() -> object:
        kept.append(library.RapidOCR(params={"EngineConfig.onnxruntime.use_cuda": True}))
        return list(kept[-1](written("HELLO")).txts)

    return use


def rapidocr_onnxruntime(_folder: Path) -> Callable[[], object]:
    library: Any = importlib.import_module("rapidocr_onnxruntime")

    def use() -> object:
        kept.append(library.RapidOCR(det_use_cuda=True, cls_use_cuda=True, rec_use_cuda=True))
        found, _ = kept[-1](written("HELLO"))
        return [text for _, text, _ in found]

    return use


def written(text: str) -> Any:
    import numpy as np

    cv2: Any = importlib.import_module("cv2")
    picture = np.full((100, 400, 3), 255, np.uint8)
    cv2.putText(picture, text, (30, 70), cv2.FONT_HERSHEY_SIMPLEX, 2, (0, 0, 0), 4)
    return picture


def insightface(folder: Path) -> Callable[[], object]:
    """Its class of sessions is a subclass, defined when it is imported; and it moves sessions to the CPU."""
    zoo: Any = importlib.import_module("insightface.model_zoo")

    def use() -> object:
        import numpy as np

        kept.append(zoo.get_model(str(face_model(folder / "face.onnx"))))
        model = kept[-1]
        before = model.session.get_providers()
        if CUDA in before:
            kept.append(pickle.loads(pickle.dumps(model.session)))
            try:
                model.prepare(ctx_id=-1)
            except ValueError as refused:
                return [type(refused).__name__, model.session.get_providers() == before]
        return list(model.get_feat(np.zeros((112, 112, 3), np.uint8)).shape)

    return use


def fastembed(folder: Path) -> Callable[[], object]:
    library: Any = importlib.import_module("fastembed")

    def use() -> object:
        model = text_model(folder / "model_optimized.onnx")
        kept.append(library.TextEmbedding("BAAI/bge-small-en-v1.5", cuda=True, specific_model_path=str(model.parent)))
        return [list(vector.shape) for vector in kept[-1].embed(["hello world", "hello"])]

    return use


def model_class_of_optimum() -> Any:
    library: Any = importlib.import_module("optimum.onnxruntime")
    return library.ORTModelForFeatureExtraction  # imported when it is asked for


def optimum(folder: Path) -> Callable[[], object]:
    model_class = model_class_of_optimum()
    torch: Any = importlib.import_module("torch")

    def use() -> object:
        model = text_model(folder / "optimum" / "model.onnx")
        kept.append(model_class.from_pretrained(str(model.parent), provider=CUDA, use_io_binding=False))
        if CUDA in kept[-1].providers and not torch.cuda.is_available():
            return str(kept[-1].device)  # it would hand the model to a torch that has no CUDA
        names = ("input_ids", "attention_mask")
        tokens = {name: torch.ones((1, 3), dtype=torch.int64, device=kept[-1].device) for name in names}
        return list(kept[-1](**tokens).last_hidden_state.shape)

    return use


def sentence_transformers(folder: Path) -> Callable[[], object]:
    model_class_of_optimum()  # which makes the session
    library: Any = importlib.import_module("sentence_transformers")
    torch: Any = importlib.import_module("torch")

    def use() -> object:
        model = text_model(folder / "sentences" / "model.onnx")
        settings = {"provider": CUDA, "file_name": model.name}
        kept.append(library.SentenceTransformer(str(model.parent), backend="onnx", model_kwargs=settings))
        if CUDA in kept[-1][0].auto_model.providers and not torch.cuda.is_available():
            return str(kept[-1][0].auto_model.device)
        return list(kept[-1].encode(["hello world", "hello"]).shape)

    return use


USES = (rembg, rapidocr, rapidocr_onnxruntime, insightface, fastembed, optimum, sentence_transformers)
LIBRARIES = {use.__name__: use for use in USES}


def main(name: str, mode: str, folder: Path) -> None:
    if mode == "before":
        import ortgpu

        ortgpu.install()
    try:
        use = LIBRARIES[name](folder)
    except ImportError as error:
        report({"not importable": f"{type(error).__name__}: {error}"})
        return
    if mode in ("after", "verified"):
        import ortgpu

        ortgpu.install()
    if mode == "verified":
        pretend_gpu()
    try:
        result = use()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test asks about
        as_dict = getattr(error, "as_dict", None)
        report({"error": as_dict() if as_dict else {"type": type(error).__name__, "summary": str(error)}})
        return
    report({"result": result, "sessions": listed()})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
