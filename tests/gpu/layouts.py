"""Programs about sessions whose images are channels-last; see programs.py."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from tests.gpu.programs import attempt, device_facts, relative_error
from tests.support.children import report
from tests.support.networks import CHANNELS, SIZE, Network, random_network
from tests.support.plain_session import plain_session


def layouts(networks: int, batches: list[int]) -> None:
    """Random networks: how far what ours and plain ONNX Runtime give is from what the CPU gives."""
    import numpy as np

    from ortgpu import GPUSession

    worst = {"ours": 0.0, "graph": 0.0, "plain": 0.0}
    not_chosen = []
    for number in range(networks):
        model: Any = random_network(number)
        random = np.random.default_rng(number)
        feeds = [{"x": random.standard_normal((batch, CHANNELS, SIZE, SIZE), dtype=np.float32)} for batch in batches]
        reference, plain = plain_session(model, "cpu"), plain_session(model)
        expected = [reference.run(None, feed) for feed in feeds]
        with GPUSession(model) as session, GPUSession(model, cuda_graph=True) as graph:
            not_chosen += [number for each in (session, graph) if "prefer_nhwc" not in each.options_chosen]
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
    report("not chosen", not_chosen)


def layout_options(model: str) -> None:
    from ortgpu import GPUSession

    cuda = "CUDAExecutionProvider"
    for name, options in {"alone": {}, "refused": {"prefer_nhwc": "0"}, "tf32": {"use_tf32": "0"}}.items():
        with GPUSession(model, providers=[(cuda, options)]) as session:
            report(name, {"chosen": dict(session.options_chosen), **device_facts(session)})


def computed_weights() -> None:
    """ONNX Runtime fails with what it would be given if this layout were chosen here."""
    import numpy as np

    from ortgpu import GPUSession

    network = Network(0)
    for _ in range(8):
        network.conv()
    network.inputs.append(("weights", [CHANNELS, CHANNELS, 3, 3]))
    network.add("Conv", network.current, "weights", network.weights(CHANNELS), kernel_shape=[3, 3])
    model: Any = network.model()
    random = np.random.default_rng(0)
    shapes = {"x": (2, CHANNELS, SIZE, SIZE), "weights": (CHANNELS, CHANNELS, 3, 3)}
    feed = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    expected = plain_session(model, "cpu").run(None, feed)
    attempt("ours", lambda: relative_error(GPUSession(model).run(None, feed), expected))
    forced = plain_session(model, options={"prefer_nhwc": "1"})
    attempt("forced", lambda: relative_error(forced.run(None, feed), expected))


PROGRAMS: dict[str, Callable[..., None]] = {
    "layouts": layouts,
    "layout_options": layout_options,
    "computed_weights": computed_weights,
}
