"""Compare an open session with the CPU, and find the first tensor of its model that diverges."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...model.files import ModelSource
from ...provider.interfaces import VerifiedSession
from ...provider.lifetime import device_of
from ...provider.settings import CAPTURE, FLOAT16, SETTINGS, Settings, options_of
from .children import LONGEST_START, ON_CPU, Child, Place, Work, first_line
from .comparing import TOLERANCE, Comparison, compare, several_runs
from .halving import LARGE, halved, source_of
from .trial import WARMING, Single, open_at, results
from .tuning import asked, results_of_cpu

_EXPOSED = 8  # tensors at a time
_VANISHED = "exposing tensors made it vanish: with them as outputs, operators are not fused"
_TOO_LARGE = "the model is too large to look inside"


def compare_with_cpu(session: VerifiedSession, model: ModelSource, feed: Mapping[str, Any]) -> tuple[Comparison, str]:
    """Compare the results of an open session as :func:`ortgpu.tune` compares the results of candidates.

    Return the comparison, whose fault names the place where results first go wrong, and what they were compared with.

    Raises:
        Exception: whatever plain ONNX Runtime or the session raises.
    """
    place, source = Place(device_of(session).ordinal), source_of(model)
    with Child() as child:
        right, compared_with = results_of_cpu(child, source, [feed], LONGEST_START)
        (plain,) = asked(child, results, source, place, [feed])
        names = [output.name for output in session._outputs_meta]
        comparison = Comparison(names, right[0] if right is not None else None, plain)
        comparison.add_all(several_runs(session, feed))
        if comparison.wrong is not None:
            work = Work(source, place, (feed,), right)
            comparison.wrong += f"; {_divergence(child, work, _settings_of(session))}"
    return comparison, compared_with


def _settings_of(session: VerifiedSession) -> Settings:
    """Return the settings that a session has chosen."""
    chosen = {option: value for option, (value, _) in session._verified.options_chosen.items()}
    return {
        name: value
        for name, values in SETTINGS.items()
        for value, options in values.items()
        if options and options.items() <= chosen.items()
    }


def _divergence(child: Child, work: Work, settings: Settings) -> str:
    """Return the place where the results of settings first go wrong, for a person."""
    try:
        where: str = child.ask(locate, work, settings, timeout=LONGEST_START)
    except Exception as error:  # noqa: BLE001 - of whatever class: the comparison stands
        return f"the tensor at fault was not found: {first_line(error)}"
    return where


def locate(work: Work, settings: Settings) -> str:
    """Return between which tensors of the main graph results go wrong, for a person. A child calls this.

    Few tensors at a time become outputs of the model, since each may keep operators from being fused.
    """
    import onnx

    if isinstance(work.model, bytes):
        model = onnx.load_model_from_string(work.model)
    elif os.path.getsize(work.model) > LARGE:
        return _TOO_LARGE
    else:
        model = onnx.load(work.model)
    if model.ByteSize() > LARGE:  # with its external data
        return _TOO_LARGE
    made = {output.name for output in model.graph.output}
    last = max(at for at, node in enumerate(model.graph.node) if made.intersection(node.output))
    tensors = [name for node in model.graph.node[: last + 1] for name in node.output if name and name not in made]
    return _located(work, settings, model, tensors, work.feeds[0])


def _located(work: Work, settings: Settings, model: Any, tensors: Sequence[str], feed: Mapping[str, Any]) -> str:
    agreeing, diverging = -1, len(tensors)
    while diverging - agreeing > 1:
        between = diverging - agreeing - 1
        few = sorted({agreeing + 1 + between * (step + 1) // (_EXPOSED + 1) for step in range(_EXPOSED)})
        wrong = _first_wrong(work, settings, model, [tensors[at] for at in few], feed)
        if wrong is None:
            return _VANISHED
        if wrong < len(few):
            diverging = few[wrong]
        if wrong > 0:
            agreeing = few[wrong - 1]
    before = f"tensor {tensors[agreeing]!r}" if agreeing >= 0 else "the inputs"
    after = f"tensor {tensors[diverging]!r}" if diverging < len(tensors) else "the outputs"
    return f"{before} still agreed, {after} did not"


def _first_wrong(
    work: Work, settings: Settings, model: Any, exposed: Sequence[str], feed: Mapping[str, Any]
) -> int | None:
    """Return the position of the first exposed tensor that is wrong, or their number if only the outputs are."""
    import onnx

    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in exposed)
    source = changed.SerializeToString()
    asked = options_of(settings)
    expected = open_at(work.place, source, {}, {}).run(None, dict(feed))
    right = expected if work.right is None else open_at(ON_CPU, source, {}, {}).run(None, dict(feed))
    tolerance = TOLERANCE if work.right is None or FLOAT16 in asked else None
    if FLOAT16 in asked:
        source = halved(changed).SerializeToString()
    session = open_at(work.place, source, settings, {})
    if CAPTURE in asked:  # each run would capture
        captured = Single(session, feed, expected, work.place, 0)
        for _ in range(WARMING):
            captured.run()
        several: Sequence[Sequence[Any]] = captured.results
    else:
        several = several_runs(session, feed)
    count = len(changed.graph.output) - len(exposed)
    order = [*range(count, count + len(exposed)), *range(count)]
    for position, at in enumerate(order):
        if any(compare(right[at], expected[at], found[at], tolerance)[1] is not None for found in several):
            return min(position, len(exposed))
    return None
