"""From what a session makes plans for further shapes, with which options, and why it makes none. Nothing is opened."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from ortgpu.provider.options import Carried
from ortgpu.provider.placement import PlacedNode, Placement
from ortgpu.provider.requests import parse
from ortgpu.running.memory import Holdings
from ortgpu.session import shapes as module
from ortgpu.session.request import SessionRequest, Verified
from ortgpu.session.shapes import NoPlansError, PlanSource, maker_of, room_for
from tests.support.made_sessions import H200, L4

shapes: Any = module
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
MIB = 1 << 20
CONVOLUTION = Placement((PlacedNode("c", "Conv", "", CUDA, "compute"),))
RELU = Placement((PlacedNode("r", "Relu", "", CUDA, "compute"),))


def made(
    options: dict[str, str] | None = None,
    *,
    device: Any = L4,
    placement: Placement = CONVOLUTION,
    chosen: dict[str, tuple[str, str]] | None = None,
    shape: tuple[Any, ...] = ("n", 3),
    bound: tuple[str, ...] = (CUDA, CPU),
    room: int | None = None,
    **request: Any,
) -> Any:
    """Return what makes the plans of a session on the second GPU; None if it needs none."""
    session: Any = SimpleNamespace(
        _sess=SimpleNamespace(inputs_meta=[SimpleNamespace(shape=shape)], get_providers=lambda: bound),
        _holdings=Holdings(room=room),
        _model_stamp=(7,),
        _overridable_initializers=[SimpleNamespace(name="w")],
        _pinned_memory_limit=9,
    )
    asked = SessionRequest(b"model", providers=parse([(CUDA, options or {}), CPU], None), **request)
    return maker_of(session, asked, Verified(device, placement, chosen or {}), staged=True)


def source(*arguments: Any, **named: Any) -> PlanSource:
    maker = made(*arguments, **named)
    assert maker.__func__ is PlanSource.make
    found: PlanSource = maker.__self__
    return found


@pytest.mark.parametrize(
    "reason",
    [{"is_guarded": True}, {"placement": RELU}, {"placement": Placement(())}, {"shape": (1, 3)}],
    ids=["guarded", "no convolution", "no node", "fixed shapes"],
)
def test_a_session_that_needs_no_plans_makes_none(reason: dict[str, Any]) -> None:
    assert made(**reason) is None
    assert made() is not None


@pytest.mark.parametrize(
    ("session", "why"),
    [
        ({"bound": ("TensorrtExecutionProvider", CUDA, CPU)}, "it has other providers than CUDA"),
        ({"options": {"gpu_mem_limit": "1000"}}, "the caller set gpu_mem_limit"),
        ({"options": {"enable_cuda_graph": "1"}}, "the caller set enable_cuda_graph"),
        ({"options": {"user_compute_stream": "77"}}, "the caller set user_compute_stream"),
        ({"room": 0}, "its budget of GPU memory leaves no room"),
        ({"chosen": {"float16": ("1", "a record")}}, "its record of tune converts the model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_session_that_can_have_no_plans_says_why(session: dict[str, Any], why: str) -> None:
    with pytest.raises(NoPlansError, match=why):
        made(**session)(8)


@pytest.mark.parametrize("options", [{"enable_cuda_graph": "0"}, {"enable_cuda_graph": "False"}, {"use_tf32": "0"}])
def test_options_that_hinder_no_plans(options: dict[str, str]) -> None:
    assert source(options).cuda_options == {**options, "device_id": "1"}


def test_plans_are_made_from_what_the_session_was_opened_with() -> None:
    chosen = {
        "prefer_nhwc": ("1", "a record"),
        "intra_op_num_threads": ("4", "a record"),
        "free_dimension_overrides": ('{"h": 24}', "a record"),
    }
    found = source({"use_tf32": "0"}, chosen=chosen, room=5, others={"disabled_optimizers": ["a"]})
    assert found.cuda_options == {"use_tf32": "0", "prefer_nhwc": "1", "device_id": "1"}
    assert (found.model, found.stamp, found.device, found.placement) == (b"model", (7,), L4, CONVOLUTION)
    assert (found.sizes, found.others) == ({"h": 24}, {"disabled_optimizers": ["a"]})
    assert (found.overridable, found.pinned_memory_limit, found.staged, found.most) == (("w",), 9, True, 5)
    assert source(device=H200).cuda_options == {}, "ONNX Runtime warns of options that name the first GPU"


@pytest.mark.parametrize(("gpu", "own"), [(H200, {}), (L4, {"device_id": "1"})], ids=str)
def test_plans_are_on_the_gpu_of_the_session_within_their_limit(gpu: Any, own: dict[str, str]) -> None:
    found = source({"use_tf32": "0"}, device=gpu)
    assert found._providers(None) == [(CUDA, {"use_tf32": "0", **own}), (CPU, {})]
    limits = {"gpu_mem_limit": "1000", "use_ep_level_unified_stream": "1", "prefer_nhwc": "0"}
    assert found._providers(1000) == [(CUDA, {"use_tf32": "0", **own, **limits}), (CPU, {})]
    assert replace(found, device=replace(gpu, kind="cpu"))._providers(1000) == [(CPU, {})]


@pytest.mark.parametrize(("severity", "logs"), [(0, 3), (2, 3), (4, 4)])
def test_plans_log_no_warning_a_second_time(severity: int, logs: int) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = severity
    options.enable_profiling = True
    found = replace(source(), options=Carried(options))._new_options()
    assert (found.log_severity_level, found.enable_profiling) == (logs, False)
    assert source()._new_options().log_severity_level == 3


@pytest.mark.parametrize(
    ("free", "weights", "most", "room"),
    [
        (1000, 100, None, 500),  # half of it
        (1000, 250, None, 500),
        (1000, 251, None, "half of the GPU's free memory"),
        (1000, 100, 700, 700),  # a budget
        (600, 100, 700, 600),  # a budget, of which others have taken a part
        (1000, 100, 199, "their weights take"),
        (None, 0, None, "free memory is unknown"),
    ],
)
def test_plans_have_room_for_their_weights_twice(
    monkeypatch: pytest.MonkeyPatch, free: int | None, weights: int, most: int | None, room: int | str
) -> None:
    asked: list[str] = []

    def read(uuid: str) -> int | None:
        asked.append(uuid)
        return free

    monkeypatch.setattr(shapes, "free_memory", read)
    if isinstance(room, str):
        with pytest.raises(NoPlansError, match=room):
            room_for(L4, weights, most)
    else:
        assert room_for(L4, weights, most) == room
    assert asked == [L4.uuid]
    assert room_for(replace(L4, kind="cpu"), weights, most) is None


NODES = {CUDA: PlacedNode("c", "Conv", "", CUDA, "compute"), CPU: PlacedNode("u", "Unique", "", CPU, "compute")}


@pytest.mark.parametrize(
    ("before", "now", "holds"),
    [
        ((CUDA,), (CUDA,) * 4, True),
        ((CUDA,), (*(CUDA,) * 3, CPU), False),
        ((CUDA, CPU), (*(CUDA, CPU) * 4,), True),
        ((CUDA, CPU), (*(CUDA, CPU) * 4, CPU), False),
        ((CUDA, CPU), (CUDA,) * 4, True),
        ((CUDA,), None, False),
    ],
)
def test_plans_compute_on_the_cpu_what_the_session_does_there(
    monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], now: tuple[str, ...] | None, holds: bool
) -> None:
    known = Placement((), known=False) if now is None else Placement(tuple(NODES[place] for place in now))
    monkeypatch.setattr(shapes, "read_placement", lambda session, without_options: known)
    found = replace(source(), placement=Placement(tuple(NODES[place] for place in before)))
    check = partial(found._check_placement, None, 4)
    if holds:
        check()
    else:
        with pytest.raises(NoPlansError, match="other nodes of it on the CPU"):
            check()
