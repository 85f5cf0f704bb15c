"""What a caller may ask for: provider lists, in every form, with names that exist, in an order that puts CUDA first."""

from __future__ import annotations

import itertools
import pickle
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ortgpu.errors import GPUError, ProviderRequestError
from ortgpu.provider.requests import CHOSEN_OPTIONS, ProviderList, check_names, cuda_first, drop_unintended, parse
from tests.support.made_requests import ALL_KNOWN, AVAILABLE, CPU_PROVIDER, CUDA, RTX, TENSORRT, attempt


def test_the_search_for_algorithms_is_the_one_that_was_measured() -> None:
    """EXHAUSTIVE, ONNX Runtime's default, times all algorithms again for each new shape."""
    assert {name: value for name, (value, _) in CHOSEN_OPTIONS.items()} == {"cudnn_conv_algo_search": "HEURISTIC"}


# Forms of a request


@pytest.mark.parametrize(
    ("providers", "options", "names", "given"),
    [
        (None, None, (), {}),
        (None, [], (), {}),
        ([], None, (), {}),
        ([CUDA], None, (CUDA,), {}),
        ((CUDA, CPU_PROVIDER), None, (CUDA, CPU_PROVIDER), {}),
        ([(CUDA, {})], None, (CUDA,), {}),
        ([(CUDA, {"device_id": 1}), CPU_PROVIDER], None, (CUDA, CPU_PROVIDER), {CUDA: {"device_id": "1"}}),
        ([(CUDA, {"use_tf32": False, 1: 2.5})], None, (CUDA,), {CUDA: {"use_tf32": "False", "1": "2.5"}}),
        ([CUDA], [{"device_id": "1"}], (CUDA,), {CUDA: {"device_id": "1"}}),
        ([CUDA, CPU_PROVIDER], [{"device_id": 1}, {}], (CUDA, CPU_PROVIDER), {CUDA: {"device_id": "1"}}),
        ([CUDA], ({"device_id": 1},), (CUDA,), {CUDA: {"device_id": "1"}}),
        ([CUDA, CPU_PROVIDER, CPU_PROVIDER], None, (CUDA, CPU_PROVIDER), {}),
        ([CUDA, (CUDA, {"device_id": 1})], None, (CUDA,), {}),
        ([(CUDA, {"device_id": 1}), (CUDA, {"device_id": 2})], None, (CUDA,), {CUDA: {"device_id": "1"}}),
        ([CUDA, CUDA], [{"device_id": 1}, {"device_id": 2}], (CUDA,), {CUDA: {"device_id": "1"}}),
    ],
)  # fmt: skip
def test_forms(providers: Any, options: Any, names: tuple[str, ...], given: dict[str, dict[str, str]]) -> None:
    found = parse(providers, options)
    assert found.names == names
    assert {name: found.options_of(name) for name in names if found.options_of(name)} == given
    assert found.provider_arguments() == [(name, given.get(name, {})) for name in names]


@pytest.mark.parametrize(
    ("providers", "options", "says"),
    [
        (CUDA, None, "is a str"),
        (b"CUDA", None, "is a bytes"),
        ({CUDA: {}}, None, "is a dict"),
        ({CUDA}, None, "is a set"),
        (1, None, "is a int"),
        (iter([CUDA]), None, "not a list"),
        ([CUDA, 1], None, "1 is neither"),
        ([None], None, "None is neither"),
        ([(CUDA,)], None, "is neither"),
        ([(CUDA, {}, {})], None, "is neither"),
        ([(CUDA, None)], None, "is neither"),
        ([(CUDA, [("device_id", 0)])], None, "is neither"),
        ([[CUDA, {"device_id": 0}]], None, "is neither"),
        ([(1, {})], None, "is neither"),
        (None, [{"device_id": 0}], "provider_options without providers"),
        ([CUDA], [], "1 providers and 0 provider_options"),
        ([CUDA], [{}, {}], "1 providers and 2 provider_options"),
        ([CUDA], {"device_id": 0}, "provider_options is a dict"),
        ([CUDA], "x", "provider_options is a str"),
        ([CUDA], [None], "must be dicts"),
        ([(CUDA, {"device_id": 0})], [{}], "in providers and in provider_options"),
    ],
)
def test_malformed(providers: Any, options: Any, says: str) -> None:
    with pytest.raises(ProviderRequestError, match=re.escape(says)) as caught:
        parse(providers, options)
    assert caught.value.evidence
    assert caught.value.fixes


def test_a_malformed_request_can_go_to_another_process() -> None:
    """The error holds what was asked for, which may be anything: a generator, or an object with a lock in it."""
    for requested in ((name for name in [CUDA]), [(CUDA, {"user_compute_stream": lambda: 0}, 1)]):
        with pytest.raises(ProviderRequestError) as caught:
            parse(requested, None)
        again = pickle.loads(pickle.dumps(caught.value))
        assert str(again) == str(caught.value)
        assert again.requested == caught.value.requested is not None


def test_the_malformed_request_is_carried() -> None:
    with pytest.raises(ProviderRequestError) as caught:
        parse([CUDA, 1], None)
    assert caught.value.requested == [CUDA, 1]


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.text(max_size=3)
    | st.sampled_from([CUDA, CPU_PROVIDER, "cuda"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 2), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(providers=ANYTHING, options=ANYTHING)
def test_any_request_is_read_or_refused(providers: Any, options: Any) -> None:
    found = attempt(lambda: parse(providers, options))
    if isinstance(found, GPUError):
        assert type(found) is ProviderRequestError
        assert pickle.loads(pickle.dumps(found)).requested == found.requested
        return
    assert len(set(found.names)) == len(found.names)
    for name in found.names:
        assert all(isinstance(text, str) for item in found.options_of(name).items() for text in item)
    arranged = cuda_first(found)
    assert (arranged.names.count(CUDA), arranged.names[-1]) == (1, CPU_PROVIDER)


# Names


@pytest.mark.parametrize("names", [(), (CUDA,), (TENSORRT, CUDA, CPU_PROVIDER), (CPU_PROVIDER,)])
def test_names_that_are_there(names: tuple[str, ...]) -> None:
    check_names(ProviderList(names), ALL_KNOWN, AVAILABLE)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("cuda", CUDA),
        ("CUDA", CUDA),
        ("CudaExecutionProvider", CUDA),
        ("CUDAExecutionprovider", CUDA),
        ("CUDAExecutionProvder", CUDA),
        ("CUDA_Execution_Provider", CUDA),
        ("TensorRTExecutionProvider", TENSORRT),
        ("TRTExecutionProvider", None),
        ("tensorrt", TENSORRT),
        ("cuda:0", CUDA),
        ("GPU", CUDA),
        ("GPUExecutionProvider", CUDA),
        ("NVIDIA", CUDA),
        ("cpu", CPU_PROVIDER),
        ("CPUExecutionProviders", CPU_PROVIDER),
    ],
)
def test_misspelt_names(name: str, suggestion: str | None) -> None:
    with pytest.raises(ProviderRequestError, match=rf"there is no execution provider '{name}'") as caught:
        check_names(ProviderList((CPU_PROVIDER, name)), ALL_KNOWN, AVAILABLE)
    if suggestion:
        assert f"did you mean '{suggestion}'?" in caught.value.summary
        assert [str(fix) for fix in caught.value.fixes] == [f"write '{suggestion}'"]
    assert caught.value.requested == (CPU_PROVIDER, name)
    assert ", ".join(AVAILABLE) in caught.value.evidence[0]


@pytest.mark.parametrize("name", ["", "gpu please", "☃", "x" * 10_000, "migraphx", "npu", "MLUExecutionProvider"])
def test_names_without_a_suggestion(name: str) -> None:
    with pytest.raises(ProviderRequestError) as caught:
        check_names(ProviderList((name,)), ALL_KNOWN, AVAILABLE)
    assert "did you mean" not in caught.value.summary
    assert caught.value.fixes == (f"leave {name!r} out",)


def test_a_name_of_another_build() -> None:
    with pytest.raises(ProviderRequestError, match="CoreMLExecutionProvider is not part of the installed"):
        check_names(ProviderList(("CoreMLExecutionProvider",)), ALL_KNOWN, AVAILABLE)


@pytest.mark.parametrize("options", [{}, {"device_id": "1"}], ids=["no options", "the same device for all"])
@pytest.mark.parametrize("names", list(itertools.permutations(AVAILABLE)))
def test_the_whole_available_list_asks_for_no_tensorrt(names: tuple[str, ...], options: dict[str, str]) -> None:
    requested = ProviderList(names, dict.fromkeys(names, options))
    left = drop_unintended(requested, ALL_KNOWN, AVAILABLE)
    assert left.options_of(CUDA) == options
    assert left.names == tuple(name for name in names if name != TENSORRT)


@pytest.mark.parametrize(
    "requested",
    [
        ProviderList((TENSORRT, CUDA)),
        ProviderList(tuple(AVAILABLE), {TENSORRT: {"trt_fp16_enable": "1"}}),
        ProviderList(tuple(AVAILABLE), {TENSORRT: {"device_id": "1"}}),
        ProviderList((RTX, CUDA, CPU_PROVIDER)),
        ProviderList((CUDA, "cudda")),
        ProviderList(("CoreMLExecutionProvider", CPU_PROVIDER)),
    ],
)
def test_what_a_person_wrote_stays(requested: ProviderList) -> None:
    assert drop_unintended(requested, ALL_KNOWN, AVAILABLE) is requested or (
        drop_unintended(requested, ALL_KNOWN, AVAILABLE) == requested
    )


@pytest.mark.parametrize("other", ["AzureExecutionProvider", "CoreMLExecutionProvider", "MIGraphXExecutionProvider"])
def test_providers_of_other_builds_beside_cuda_are_left_out(other: str) -> None:
    for names in ((other, CUDA, CPU_PROVIDER), (CUDA, other), (CUDA, CPU_PROVIDER, other)):
        left = drop_unintended(ProviderList(names), ALL_KNOWN, AVAILABLE)
        assert left.names == tuple(name for name in names if name != other)


def test_cuda_in_a_build_without_it_is_for_the_diagnosis() -> None:
    check_names(ProviderList((CUDA,)), ALL_KNOWN, [CPU_PROVIDER])


def test_a_plugin_that_only_this_process_knows() -> None:
    check_names(ProviderList(("MyExecutionProvider",)), ALL_KNOWN, [*AVAILABLE, "MyExecutionProvider"])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_name_is_known_or_refused(name: str) -> None:
    assume(name not in ALL_KNOWN)
    with pytest.raises(ProviderRequestError):
        check_names(ProviderList((name,)), ALL_KNOWN, AVAILABLE)


# Order


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ((), (CUDA, CPU_PROVIDER)),
        ((CUDA,), (CUDA, CPU_PROVIDER)),
        ((CPU_PROVIDER,), (CUDA, CPU_PROVIDER)),
        ((CPU_PROVIDER, CUDA), (CUDA, CPU_PROVIDER)),
        ((TENSORRT,), (TENSORRT, CUDA, CPU_PROVIDER)),
        ((TENSORRT, CUDA), (TENSORRT, CUDA, CPU_PROVIDER)),
        ((CUDA, TENSORRT), (CUDA, TENSORRT, CPU_PROVIDER)),
        ((RTX, TENSORRT, CPU_PROVIDER, CUDA), (RTX, TENSORRT, CUDA, CPU_PROVIDER)),
        ((TENSORRT, CPU_PROVIDER), (TENSORRT, CUDA, CPU_PROVIDER)),
        (("AzureExecutionProvider", CUDA), (CUDA, "AzureExecutionProvider", CPU_PROVIDER)),
        ((CPU_PROVIDER, "AzureExecutionProvider"), (CUDA, "AzureExecutionProvider", CPU_PROVIDER)),
    ],
)
def test_cuda_is_first(requested: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert cuda_first(ProviderList(requested)).names == expected
    assert cuda_first(ProviderList(requested), keep_cpu=False).names == expected[:-1]


def test_options_stay_with_their_provider() -> None:
    requested = parse([(CPU_PROVIDER, {"use_arena": 1}), (CUDA, {"use_tf32": 0})], None)
    assert cuda_first(requested).provider_arguments() == [(CUDA, {"use_tf32": "0"}), (CPU_PROVIDER, {"use_arena": "1"})]


@settings(max_examples=100, deadline=None)
@given(st.permutations(ALL_KNOWN), st.integers(0, len(ALL_KNOWN)), st.booleans())
def test_nothing_is_lost_in_the_order(names: list[str], count: int, keep_cpu: bool) -> None:
    requested = tuple(names[:count])
    arranged = cuda_first(ProviderList(requested), keep_cpu=keep_cpu).names
    assert set(arranged) == {*requested, CUDA} - {CPU_PROVIDER} | ({CPU_PROVIDER} if keep_cpu else set())
    assert len(set(arranged)) == len(arranged)
    assert set(arranged[: arranged.index(CUDA)]) <= {TENSORRT, RTX}
    once = cuda_first(ProviderList(requested), keep_cpu=keep_cpu)
    assert cuda_first(once, keep_cpu=keep_cpu) == once
