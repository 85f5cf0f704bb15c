"""``ortgpu check --compare``: an open session beside the CPU, and the first tensor of its model that diverges."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ortgpu.model.files import LARGE, ModelSource, source_of
from ortgpu.process.late import late
from ortgpu.provider.interfaces import VerifiedSession
from ortgpu.provider.lifetime import device_of
from ortgpu.provider.settings import SETTINGS, Settings
from ortgpu.running.comparing import TOLERANCE, Comparison, compare
from ortgpu.session.tuning.children import LONGEST_START, ON_CPU, Child, Place, first_line
from ortgpu.session.tuning.trial import open_at, results, several_runs
from ortgpu.session.tuning.tuning import results_of_cpu

if TYPE_CHECKING:
    import onnx
else:
    onnx = late("onnx")

_VANISHED = "the difference vanishes when inner tensors become outputs, since operators are not fused then"
_TOO_LARGE = "the model is too large to find the first tensor that differs"


def compare_with_cpu(session: VerifiedSession, model: ModelSource, feed: Mapping[str, Any]) -> tuple[Comparison, str]:
    """Compare the results of an open session as :func:`ortgpu.tune` compares the results of candidates.

    Return the comparison, and the name of its reference. A fault names the place of the first wrong result.

    Raises:
        Exception: any exception of plain ONNX Runtime or the session.
    """
    place, source = Place(device_of(session).ordinal), source_of(model)
    with Child() as child:
        right, compared_with = results_of_cpu(child, source, [feed], LONGEST_START)
        (plain,) = child.open(results, source, place, [feed])
        names = [output.name for output in session._outputs_meta]
        comparison = Comparison(names, right[0] if right is not None else None, plain)
        comparison.add_all(several_runs(session, feed))
        if comparison.wrong is not None:
            arguments = source, place, feed, _settings_of(session), right is not None
            try:
                where = child.ask(locate, *arguments, timeout=LONGEST_START)
            except Exception as error:  # noqa: BLE001 - of whatever class: the comparison stands
                where = f"the first tensor that differs was not found: {first_line(error)}"
            comparison.wrong += f"; {where}"
    return comparison, compared_with


def _settings_of(session: VerifiedSession) -> Settings:
    """Return the settings that a session has chosen."""
    session_options = {option: value for option, (value, _) in session._verified.options_chosen.items()}
    return {
        name: value
        for name, values in SETTINGS.items()
        for value, options in values.items()
        if options and options.items() <= session_options.items()
    }


def locate(model: bytes | str, place: Place, feed: Mapping[str, Any], settings: Settings, has_cpu: bool) -> str:
    """Return a sentence about the tensors of the main graph between which results go wrong. A child calls this.

    A bisection makes one tensor at a time an output of the model, since an output may keep operators from being fused.

    Args:
        has_cpu: True if the CPU gives results to compare with. Otherwise plain ONNX Runtime gives them.
    """
    if isinstance(model, bytes):
        loaded = onnx.load_model_from_string(model)
    elif os.path.getsize(model) > LARGE:
        return _TOO_LARGE
    else:
        loaded = onnx.load(model)
    if loaded.ByteSize() > LARGE:  # This size includes external data.
        return _TOO_LARGE
    outputs = {output.name for output in loaded.graph.output}
    last = max(at for at, node in enumerate(loaded.graph.node) if outputs.intersection(node.output))
    tensors = [name for node in loaded.graph.node[: last + 1] for name in node.output if name and name not in outputs]
    agreeing, diverging = -1, len(tensors)
    while diverging - agreeing > 1:
        middle = (agreeing + diverging) // 2
        loaded.graph.output.add(name=tensors[middle])
        *outputs_agree, tensor_agrees = _agreements(loaded.SerializeToString(), place, feed, settings, has_cpu)
        del loaded.graph.output[-1]
        if not tensor_agrees:
            diverging = middle
        elif all(outputs_agree):
            return _VANISHED
        else:
            agreeing = middle
    if diverging == len(tensors):
        return "all tensors before the outputs agree"
    return f"tensor {tensors[diverging]!r} is the first that differs"


def _agreements(model: bytes, place: Place, feed: Mapping[str, Any], settings: Settings, has_cpu: bool) -> list[bool]:
    """Return, for each output of a model, whether the results of all runs with the settings are right."""
    plain = open_at(place, model, {}, {}).run(None, dict(feed))
    right = open_at(ON_CPU, model, {}, {}).run(None, dict(feed)) if has_cpu else plain
    several: Sequence[Sequence[Any]] = several_runs(open_at(place, model, settings, {}), feed)
    tolerance = None if has_cpu else TOLERANCE
    return [
        all(compare(right[at], plain[at], run[at], tolerance)[1] is None for run in several) for at in range(len(plain))
    ]
