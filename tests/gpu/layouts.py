"""Programs about sessions whose layout of images comes from a record of ``tune``; see programs.py."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.programs import device_facts, relative_error
from tests.support.children import report
from tests.support.networks import CHANNELS, SIZE, Network, random_network
from tests.support.plain_session import plain_session

FUSED = "channels-last, biases fused"
CUDA = "CUDAExecutionProvider"


def recorded(model: Any) -> Path:
    """Return the path of a record that chooses channels-last images with fused biases for a model."""
    from ortgpu import GPUSession
    from ortgpu.model.outline import GraphOutline
    from ortgpu.provider.records import Choice, Record, key_of

    with GPUSession(model, tuned=False) as session:
        key = key_of(GraphOutline(model), session.device)
    best = Choice({"search": "heuristic", "layout": FUSED}, 0.6)
    path = Path(tempfile.mkdtemp()) / "record.json"
    Record(key, best, best).write(path)
    return path


def layouts(networks: int, batches: list[int]) -> None:
    """Random networks: how far what ours and plain ONNX Runtime give is from what the CPU gives."""
    import numpy as np

    from ortgpu import GPUSession

    worst = {"ours": 0.0, "graph": 0.0, "plain": 0.0}
    without = []
    for number in range(networks):
        model: Any = random_network(number)
        record = recorded(model)
        random = np.random.default_rng(number)
        feeds = [{"x": random.standard_normal((batch, CHANNELS, SIZE, SIZE), dtype=np.float32)} for batch in batches]
        reference, plain = plain_session(model, "cpu"), plain_session(model)
        expected = [reference.run(None, feed) for feed in feeds]
        with GPUSession(model, tuned=record) as session, GPUSession(model, tuned=record, cuda_graph=True) as graph:
            without += [number for each in (session, graph) if "prefer_nhwc" not in each.options_chosen]
            results = {
                "ours": list(session.map(feeds)),
                "graph": [graph.run(None, feed) for feed in feeds * 2],
                "plain": [plain.run(None, feed) for feed in feeds],
            }
        for way, found in results.items():
            errors = [relative_error(each, right) for each, right in zip(found, expected * 2, strict=False)]
            worst[way] = max(worst[way], *errors)
        del reference, plain, session, graph
        gc.collect()
    report("worst", worst)
    report("without", without)


def layout_options(model: str) -> None:
    from ortgpu import GPUSession

    record = recorded(model)
    ways: dict[str, dict[str, Any]] = {
        "untuned": {"tuned": False},
        "recorded": {"tuned": record},
        "refused": {"tuned": record, "providers": [(CUDA, {"prefer_nhwc": "0"})]},
        "tf32": {"tuned": record, "providers": [(CUDA, {"use_tf32": "0"})]},
    }
    for name, arguments in ways.items():
        with GPUSession(model, **arguments) as session:
            report(name, {"chosen": dict(session.options_chosen), **device_facts(session)})


def layout_of_doubles() -> None:
    import numpy as np

    from ortgpu import GPUSession

    network = Network(0, np.float64)
    network.conv()
    model: Any = network.model()
    feed = {"x": np.random.default_rng(0).standard_normal((2, CHANNELS, SIZE, SIZE))}
    expected = plain_session(model).run(None, feed)  # on the CPU there is no convolution of doubles
    with GPUSession(model, tuned=recorded(model)) as session:
        report("chosen", dict(session.options_chosen))
        report("error", relative_error(session.run(None, feed), expected))


def computed_weights() -> None:
    """ONNX Runtime takes weights that are not constant to be channels-last already."""
    import numpy as np

    import ortgpu

    network = Network(0)
    network.conv()
    network.inputs.append(("weights", [CHANNELS, CHANNELS, 3, 3]))
    network.add("Conv", network.current, "weights", network.weights(CHANNELS), kernel_shape=[3, 3])
    random = np.random.default_rng(0)
    shapes = {"x": (2, CHANNELS, SIZE, SIZE), "weights": (CHANNELS, CHANNELS, 3, 3)}
    feed = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    record = Path(tempfile.mkdtemp()) / "record.json"
    found = ortgpu.tune(network.model(), feeds=[feed], budget=40, record=record)
    report("chosen", [dict(each.settings) for each in (found.automatic, found.named)])
    report("layouts", [each.verdict for each in found.trials if "layout" in each.settings])


PROGRAMS: dict[str, Callable[..., None]] = {
    "layouts": layouts,
    "layout_options": layout_options,
    "layout_of_doubles": layout_of_doubles,
    "computed_weights": computed_weights,
}
