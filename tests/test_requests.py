"""What a caller may ask for: provider lists, provider options, devices. Made lists, and the installed provider file."""

from __future__ import annotations

import importlib.metadata
import mmap
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ortgpu.devices import CPU, Device, check_form, choose, describe, ordinal_of
from ortgpu.environment.cuda import CudaDevice
from ortgpu.environment.elf import find_section
from ortgpu.errors import DeviceNotFoundError, GPUError, ProviderOptionError, ProviderRequestError
from ortgpu.providers import (
    _BOOLEAN,
    _ENUMERATED,
    _OPTION_NAMES,
    _UNSIGNED,
    ProviderList,
    check_names,
    check_options,
    cuda_first,
    parse,
)

TENSORRT, CUDA, CPU_PROVIDER = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
RTX = "NvTensorRTRTXExecutionProvider"
ALL_KNOWN = [RTX, TENSORRT, CUDA, "MIGraphXExecutionProvider", "OpenVINOExecutionProvider", "CoreMLExecutionProvider",
             "AzureExecutionProvider", CPU_PROVIDER]  # fmt: skip
AVAILABLE = [TENSORRT, CUDA, CPU_PROVIDER]

Result = TypeVar("Result")

# What the documentation of the CUDA provider names, and what its source reads besides.
DOCUMENTED_OPTIONS = {
    "device_id": "0",
    "user_compute_stream": "0",
    "gpu_mem_limit": "2147483648",
    "arena_extend_strategy": "kSameAsRequested",
    "cudnn_conv_algo_search": "HEURISTIC",
    "do_copy_in_default_stream": "1",
    "cudnn_conv_use_max_workspace": "1",
    "cudnn_conv1d_pad_to_nc1d": "0",
    "enable_cuda_graph": "0",
    "enable_skip_layer_norm_strict_mode": "0",
    "use_tf32": "1",
    "gpu_external_alloc": "0",
    "gpu_external_free": "0",
    "gpu_external_empty_cache": "0",
    "prefer_nhwc": "0",
    "tunable_op_enable": "0",
    "tunable_op_tuning_enable": "0",
    "tunable_op_max_tuning_duration_ms": "0",
    "use_ep_level_unified_stream": "0",
    "has_user_compute_stream": "0",
    "sdpa_kernel": "0",
    "fuse_conv_bias": "0",
    "enable_cudnn": "1",
}


@pytest.fixture(scope="module")
def provider_library() -> str:
    files = importlib.metadata.files("onnxruntime-gpu") or []
    (path,) = [str(file.locate()) for file in files if file.name == "libonnxruntime_providers_cuda.so"]
    return path


def attempt(function: Callable[[], Result]) -> Result | GPUError:
    """What a function returns, or the GPUError that it raises."""
    try:
        return function()
    except GPUError as error:
        return error


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
    ],
)  # fmt: skip
def test_forms(providers: Any, options: Any, names: tuple[str, ...], given: dict[str, dict[str, str]]) -> None:
    found = parse(providers, options)
    assert found.names == names
    assert {name: found.options_of(name) for name in names if found.options_of(name)} == given
    assert found.as_arguments() == [(name, given.get(name, {})) for name in names]


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
        ([CUDA, CUDA], None, f"{CUDA} is named more than once"),
        ([CUDA, (CUDA, {})], None, "more than once"),
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
    assert caught.value.fixes == ()


def test_a_name_of_another_build() -> None:
    with pytest.raises(ProviderRequestError, match="CoreMLExecutionProvider is not part of the installed"):
        check_names(ProviderList(("CoreMLExecutionProvider",)), ALL_KNOWN, AVAILABLE)


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
    assert cuda_first(requested).as_arguments() == [(CUDA, {"use_tf32": "0"}), (CPU_PROVIDER, {"use_arena": "1"})]


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


# Options, against the installed provider file


def cuda_options(options: dict[str, str]) -> ProviderList:
    return ProviderList((CUDA,), {CUDA: options})


def test_every_option_of_the_installed_provider(provider_library: str) -> None:
    check_options(cuda_options(DOCUMENTED_OPTIONS), provider_library)
    for name, value in DOCUMENTED_OPTIONS.items():
        check_options(cuda_options({name: value}), provider_library)


def test_the_spellings_that_are_suggested_exist(provider_library: str) -> None:
    assert set(DOCUMENTED_OPTIONS) == set(_OPTION_NAMES)
    assert set(_BOOLEAN) | set(_UNSIGNED) | set(_ENUMERATED) <= set(_OPTION_NAMES)
    offset, size = find_section(provider_library, ".rodata") or (0, 0)
    with open(provider_library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for name in (*_OPTION_NAMES, *(value for values in _ENUMERATED.values() for value in values)):
            assert content.find(name.encode() + b"\0", offset, offset + size) >= 0, name


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("devise_id", "device_id"),
        ("device-id", "device_id"),
        ("gpu_memory_limit", "gpu_mem_limit"),
        ("cudnn_conv_algo_serach", "cudnn_conv_algo_search"),
        ("enable_cuda_graphs", "enable_cuda_graph"),
        ("use_tf_32", "use_tf32"),
        ("arena_extend_stratgy", "arena_extend_strategy"),
        ("zzzzzzzzzzzz", None),
    ],
)
def test_misspelt_options(name: str, suggestion: str | None, provider_library: str) -> None:
    with pytest.raises(ProviderOptionError, match=f"knows no option '{name}'") as caught:
        check_options(cuda_options({"device_id": "0", name: "5"}), provider_library)
    error = caught.value
    assert (error.provider, error.option, error.value) == (CUDA, name, "5")
    if suggestion:
        assert f"did you mean '{suggestion}'?" in error.summary
        assert [str(fix) for fix in error.fixes] == [f"write '{suggestion}'"]
    else:
        assert [str(fix) for fix in error.fixes] == [f"remove '{name}'"]


@pytest.mark.parametrize("option", _BOOLEAN)
def test_boolean_values(option: str, provider_library: str) -> None:
    for value in ("0", "1", "true", "false", "True", "False"):
        check_options(cuda_options({option: value}), provider_library)
    for value in ("yes", "on", "2", "-1", "", "TRUE", "None", " 1"):
        assert_refused({option: value}, provider_library)


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("arena_extend_strategy", ("kNextPowerOfTwo", "kSameAsRequested"), ("ksameasrequested", "0", "")),
        ("cudnn_conv_algo_search", ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"), ("heuristic", "fast", "")),
        ("device_id", ("0", "7"), ("-1", "cuda:0", "1.0", "", "None", "²")),
        ("gpu_mem_limit", ("0", "2147483648", str(2**64 - 1)), ("2GB", "-5", "1e9", "", "2_000", "²")),
    ],
)
def test_values(option: str, right: tuple[str, ...], wrong: tuple[str, ...], provider_library: str) -> None:
    for value in right:
        check_options(cuda_options({option: value}), provider_library)
    for value in wrong:
        assert_refused({option: value}, provider_library)


def assert_refused(options: dict[str, str], provider_library: str | None) -> None:
    ((option, value),) = options.items()
    with pytest.raises(ProviderOptionError, match=option) as caught:
        check_options(cuda_options(options), provider_library)
    assert (caught.value.option, caught.value.value) == (option, value)
    assert caught.value.fixes


def test_options_without_a_provider_file_that_can_be_read(tmp_path: Path) -> None:
    """Names are then for ONNX Runtime to judge; values that no release knows are refused all the same."""
    for library in (None, str(tmp_path / "absent"), str(tmp_path)):
        check_options(cuda_options({"a_name": "of a later release"}), library)
        assert_refused({"use_tf32": "perhaps"}, library)


def test_options_of_others_are_not_judged(provider_library: str) -> None:
    check_options(ProviderList((TENSORRT, CUDA), {TENSORRT: {"trt_fp16_enable": "1"}}), provider_library)
    check_options(ProviderList((CUDA,)), provider_library)


@settings(max_examples=25, deadline=None)
@given(name=st.text(max_size=12), value=st.text(max_size=5))
def test_any_option_is_let_through_or_refused(name: str, value: str) -> None:
    files = importlib.metadata.files("onnxruntime-gpu") or []
    library = next(str(file.locate()) for file in files if file.name == "libonnxruntime_providers_cuda.so")
    refusal = attempt(lambda: check_options(cuda_options({name: value}), library))
    assert refusal is None or (type(refusal) is ProviderOptionError and refusal.option == name)


# Devices


def gpu(ordinal: int, uuid: str | None = None, name: str | None = "NVIDIA H200") -> CudaDevice:
    return CudaDevice(ordinal, uuid, name, (9, 0), 141 << 30, 0)


UUIDS = (
    "GPU-aaaaaaaa-0000-0000-0000-000000000000",
    "GPU-aaaabbbb-0000-0000-0000-000000000001",
    "GPU-cccccccc-0000-0000-0000-000000000002",
)
GPUS = tuple(gpu(ordinal, uuid) for ordinal, uuid in enumerate(UUIDS))


def never(uuid: str) -> int | None:
    raise AssertionError("the free memory of a device is asked for only where it decides")


@pytest.mark.parametrize(
    ("requested", "ordinal"),
    [
        (None, 0), (0, 0), (2, 2), ("0", 0), ("2", 2), (" 1 ", 1), ("cuda", 0), ("cuda:1", 1), ("CUDA:1", 1),
        ("gpu", 0), ("GPU:2", 2), (UUIDS[1], 1), (UUIDS[1].upper(), 1), (f" {UUIDS[1]} ", 1), ("GPU-aaaab", 1),
        ("GPU-c", 2), ("MIG-cccccccc-0000-0000-0000-000000000002", 2),
    ],
)  # fmt: skip
def test_a_device_that_is_there(requested: Any, ordinal: int) -> None:
    check_form(requested)
    assert choose(requested, GPUS, never) is GPUS[ordinal]


@pytest.mark.parametrize("requested", [3, 99, "3", "cuda:7", "GPU-dddd", "MIG-dddd"])
def test_a_device_that_is_not_there(requested: Any) -> None:
    check_form(requested)
    with pytest.raises(DeviceNotFoundError, match="is not among the GPUs") as caught:
        choose(requested, GPUS, never, "0,1,2")
    error = caught.value
    assert error.requested == requested
    assert error.available == tuple(describe(one.ordinal, one.name, one.uuid) for one in GPUS)
    assert "visible to this process: 3 GPUs" in error.evidence
    assert "CUDA_VISIBLE_DEVICES=0,1,2" in error.evidence
    assert all(uuid in str(error) for uuid in UUIDS)


def test_a_uuid_that_begins_several() -> None:
    with pytest.raises(DeviceNotFoundError, match="names more than one GPU"):
        choose("GPU-aaaa", GPUS, never)


@pytest.mark.parametrize(
    "requested",
    ["", " ", "cpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1.0", "-1", "1.0", "GPU-", "auto ", "AUTO", "H200",
     "cuda 0", "cuda:0,1", "gpu-xyz", "0x1", "²", "cuda:²", "9" * 5000, -1],
)  # fmt: skip
def test_what_names_no_device(requested: Any) -> None:
    for function in (check_form, lambda value: choose(value, GPUS, never)):
        with pytest.raises(DeviceNotFoundError, match="names no GPU") as caught:
            function(requested)
        assert caught.value.requested == requested
        assert ("onnxruntime.InferenceSession" in caught.value.fixes[0]) == (requested == "cpu")


@pytest.mark.parametrize("requested", [True, False, 1.0, b"cuda", ["cuda"], ("cuda", 0), object()])
def test_what_is_no_request(requested: Any) -> None:
    with pytest.raises(TypeError, match="device must be"):
        check_form(requested)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [(None, 0), (0, 0), (5, 5), ("cuda", 0), ("gpu:3", 3), ("7", 7), ("auto", None), (UUIDS[0], None)],
)
def test_ordinal_of(requested: Any, expected: int | None) -> None:
    assert ordinal_of(requested) == expected


MEMORY = st.lists(st.none() | st.integers(0, 1 << 40), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(MEMORY)
def test_auto_is_the_one_with_most_free_memory(free: list[int | None]) -> None:
    devices = [gpu(ordinal, f"GPU-{ordinal:08x}") for ordinal in range(len(free))]
    by_uuid = dict(zip((device.uuid for device in devices), free, strict=True))
    found = choose("auto", devices, lambda uuid: by_uuid[uuid])
    most = max(value or 0 for value in free)
    assert found.ordinal == next(n for n, value in enumerate(free) if (value or 0) == most)


def test_auto_without_uuids_is_the_first() -> None:
    assert choose("auto", [gpu(0), gpu(1)], never).ordinal == 0


DEVICES = st.lists(
    st.builds(
        CudaDevice,
        st.integers(0, 16),
        st.none() | st.from_regex(r"GPU-[0-9a-f]{8}", fullmatch=True),
        st.none() | st.text(max_size=5),
        st.none() | st.tuples(st.integers(1, 15), st.integers(0, 9)),
        st.none() | st.integers(0, 1 << 50),
        st.none() | st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda device: device.ordinal,
)
REQUESTS = (
    st.none()
    | st.integers(-2, 20)
    | st.sampled_from(["auto", "cuda", "cuda:1", "0", "GPU-0", "MIG-1"])
    | st.from_regex(r"GPU-[0-9a-f]{1,8}", fullmatch=True)
    | st.text(max_size=8)
)


@settings(max_examples=300, deadline=None)
@given(requested=REQUESTS, devices=DEVICES)
def test_a_request_is_one_of_the_devices_or_refused(requested: Any, devices: list[CudaDevice]) -> None:
    found = attempt(lambda: choose(requested, devices, lambda uuid: 1))
    if isinstance(found, GPUError):
        assert type(found) is DeviceNotFoundError
        assert found.requested == requested
        assert len(found.available) in (0, len(devices))
        return
    assert found in devices
    ordinal = ordinal_of(requested)
    assert ordinal in (None, found.ordinal)
    if ordinal is None and requested != "auto":
        assert (found.uuid or "").lower()[4:].startswith(requested.strip().lower()[4:])


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12) | st.from_regex(r"\s?(cuda|gpu|mig|auto)[:-]?\w{0,3}\s?"))
def test_the_form_is_checked_as_the_choice_does(requested: str) -> None:
    def refused(function: Callable[[], object]) -> bool:
        found = attempt(function)
        return isinstance(found, DeviceNotFoundError) and "names no GPU" in found.summary

    assert refused(lambda: check_form(requested)) == refused(lambda: choose(requested, GPUS, lambda uuid: 1))


def test_names_of_devices() -> None:
    device = Device("cuda", 1, UUIDS[0], "NVIDIA H200", (9, 0), 1, "580.65")
    assert str(device) == f"cuda:1 (NVIDIA H200, {UUIDS[0]})"
    assert device.is_gpu
    assert (str(CPU), CPU.is_gpu) == ("cpu", False)
    assert str(Device("cuda", 0, None, None, None, None, None)) == "cuda:0"
    assert describe(0, None, None) == "cuda:0 unnamed GPU"
