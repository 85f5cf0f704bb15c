"""Errors out of the process, and as data: pickled, copied, raised in a child, written as JSON."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import multiprocessing
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu import errors
from ortgpu.errors import Fix, GPUError, catalogue, escape_controls
from tests.support.children import ROOT
from tests.support.made_errors import EACH, contents, full


@EACH
@pytest.mark.parametrize("protocol", [0, pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL])
def test_pickle_round_trip(cls: type[GPUError], protocol: int) -> None:
    error = full(cls)
    assert contents(pickle.loads(pickle.dumps(error, protocol))) == contents(error)


@EACH
def test_copies(cls: type[GPUError]) -> None:
    error = full(cls)
    assert contents(copy.copy(error)) == contents(error)
    assert contents(copy.deepcopy(error)) == contents(error)


TEXT = st.text(max_size=20)
FIXES = st.builds(
    Fix, TEXT, kind=st.sampled_from(["shell", "python", "manual"]), needs=st.none() | st.sampled_from(["root", "host"])
)


@settings(max_examples=60, deadline=None)
@given(
    cls=st.sampled_from(sorted(catalogue().values(), key=lambda cls: cls.code)),
    summary=TEXT,
    evidence=st.lists(TEXT, max_size=3),
    fixes=st.lists(FIXES, max_size=3),
    severity=st.sampled_from(["fatal", "warning"]),
)
def test_any_text_survives(
    cls: type[GPUError], summary: str, evidence: list[str], fixes: list[Fix], severity: Any
) -> None:
    error = cls(summary, evidence=evidence, fixes=fixes, severity=severity)
    summary = escape_controls(summary)  # what an error quotes must not look like lines of its own
    assert contents(pickle.loads(pickle.dumps(error))) == contents(error)
    assert json.loads(json.dumps(error.as_dict()))["summary"] == summary
    assert str(error).startswith(summary)
    assert str(error).endswith(f"\nMore: ortgpu explain {cls.code}")


def _raise_in_child(code: str) -> None:
    raise full(catalogue()[code])


def _return_from_child(code: str) -> GPUError:
    return full(catalogue()[code])


def _each_through(submit: Callable[[str], Any]) -> None:
    for code, cls in catalogue().items():
        with pytest.raises(cls) as caught:
            submit(code)
        assert contents(caught.value) == contents(full(cls))


def test_through_a_spawned_pool() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        _each_through(lambda code: pool.apply_async(_raise_in_child, (code,)).get(timeout=60))
        returned = pool.map_async(_return_from_child, catalogue()).get(timeout=60)
    assert [contents(error) for error in returned] == [contents(full(cls)) for cls in catalogue().values()]


def test_through_an_executor() -> None:
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as executor:
        _each_through(lambda code: executor.submit(_raise_in_child, code).result(timeout=60))


@EACH
def test_as_dict_is_json(cls: type[GPUError]) -> None:
    plain = json.loads(json.dumps(full(cls).as_dict()))
    assert (plain["type"], plain["code"], plain["summary"]) == (cls.__name__, cls.code, "it failed")
    assert (plain["severity"], plain["consequence_of"]) == ("warning", "driver-too-old")
    assert plain["evidence"] == ["fact one", "fact two"]
    assert plain["fixes"][0] == {"text": "sudo reboot", "kind": "shell", "needs": "root"}
    assert set(plain["details"]) == set(cls.fields)


def test_as_dict_of_what_json_does_not_know() -> None:
    error = errors.ProviderRequestError("it failed", requested=[("CUDA", {1: {2, 3}}), b"x", object])
    plain = json.loads(json.dumps(error.as_dict()))["details"]["requested"]
    assert plain[0][0] == "CUDA"
    assert sorted(plain[0][1]["1"]) == [2, 3]
    assert all(isinstance(value, str) for value in plain[1:])


def test_the_way_to_our_error_in_one_of_a_library_that_the_page_shows() -> None:
    page = (ROOT / "examples" / "GUARD.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "find_gpu_error" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    ours = errors.DriverNotFoundError("no driver")

    def wrapped(by_hand: bool) -> Exception:
        try:
            try:
                raise ours
            except GPUError as error:
                if by_hand:
                    raise RuntimeError("cannot load the model") from error
                raise LookupError("cannot load the model")  # noqa: B904 - as libraries do
        except Exception as error:  # noqa: BLE001 - of either class
            return error

    assert names["find_gpu_error"](ours) is ours
    assert names["find_gpu_error"](wrapped(True)) is ours
    assert names["find_gpu_error"](wrapped(False)) is ours
    assert names["find_gpu_error"](ValueError()) is None
