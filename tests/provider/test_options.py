"""Options of the CUDA provider, against the installed provider file."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.environment.libraries.library_file import find_section
from ortgpu.errors import ProviderOptionError
from ortgpu.provider.requests import (
    _BOOLEAN,
    _ENUMERATED,
    _OPTION_NAMES,
    _UNSIGNED,
    ProviderList,
    _unknown_option,
    check_options,
)
from tests.lab import Stubs
from tests.lab.installed import LINKS_CUDNN
from tests.support.made_requests import CUDA, TENSORRT, attempt

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

# Those that the installed release has: enable_cudnn came with the provider that opens cuDNN on demand.
NEWER_OPTIONS = {"enable_cudnn"} if LINKS_CUDNN else set()
INSTALLED_OPTIONS = {name: value for name, value in DOCUMENTED_OPTIONS.items() if name not in NEWER_OPTIONS}


def cuda_options(options: dict[str, str]) -> ProviderList:
    return ProviderList((CUDA,), {CUDA: options})


def test_every_option_of_the_installed_provider(provider_library: str) -> None:
    check_options(cuda_options(INSTALLED_OPTIONS), provider_library)
    for name, value in INSTALLED_OPTIONS.items():
        check_options(cuda_options({name: value}), provider_library)


def test_options_are_found_wherever_they_lie_in_the_file(
    provider_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across the pieces in which it is read."""
    for size in (64, 67, 71):
        monkeypatch.setattr("ortgpu.environment.libraries.library_file._PIECE", size)
        check_options(cuda_options(INSTALLED_OPTIONS), provider_library)


def test_the_spellings_that_are_suggested_exist(provider_library: str) -> None:
    assert set(DOCUMENTED_OPTIONS) == set(_OPTION_NAMES)
    assert set(_BOOLEAN) | set(_UNSIGNED) | set(_ENUMERATED) <= set(_OPTION_NAMES)
    offset, size = find_section(provider_library, ".rodata") or (0, 0)
    with open(provider_library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for name in (*INSTALLED_OPTIONS, *(value for values in _ENUMERATED.values() for value in values)):
            assert content.find(name.encode() + b"\0", offset, offset + size) >= 0, name


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("devise_id", "device_id"),
        ("device-id", "device_id"),
        ("gpu_memory_limit", "gpu_mem_limit"),
        ("cudnn_conv_algo_serach", "cudnn_conv_algo_search"),
        ("enable_cuda_graphs", "enable_cuda_graph"),
        ("arena_extend_stratgy", "arena_extend_strategy"),
        ("cuda_graph_enable", "enable_cuda_graph"),
        ("cuda_mem_limit", "gpu_mem_limit"),
        ("DEVICE_ID", "device_id"),
        ("zzzzzzzzzzzz", None),
        ("gpu", None),
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


def test_each_option_is_suggested_for_its_common_misspellings() -> None:
    for option in _OPTION_NAMES:
        shorter = {option[:place] + option[place + 1 :] for place in range(len(option))}
        swapped = {option[:at] + option[at + 1] + option[at] + option[at + 2 :] for at in range(len(option) - 1)}
        joined = {option.replace("_", ""), option.title().replace("_", "")}
        for name in (shorter | swapped | joined) - {option}:
            assert f"did you mean '{option}'?" in _unknown_option(name, "1", None).summary, name


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("trt_fp16_enable", "TensorrtExecutionProvider"),
        ("TRT_FP16_ENABLE", "TensorrtExecutionProvider"),
        ("trt_cuda_graph_enable", "TensorrtExecutionProvider"),
        ("nv_cuda_graph_enable", "NvTensorRTRTXExecutionProvider"),
        ("migraphx_fp16_enable", "MIGraphXExecutionProvider"),
    ],
)
def test_an_option_of_another_provider(name: str, owner: str, provider_library: str) -> None:
    with pytest.raises(ProviderOptionError, match=f"'{name}', which is an option of {owner}") as caught:
        check_options(cuda_options({name: "1"}), provider_library)
    assert [str(fix) for fix in caught.value.fixes] == [f"remove {name!r}, or give it to {owner} if that is meant"]


@pytest.mark.parametrize("name", ["enable_fp16", "use_fp16", "float16_mode"])
def test_a_precision_is_no_option(name: str, provider_library: str) -> None:
    with pytest.raises(ProviderOptionError) as caught:
        check_options(cuda_options({name: "1"}), provider_library)
    assert "did you mean" not in caught.value.summary
    assert "Convert the model to float16" in str(caught.value.fixes[0])


@pytest.mark.parametrize("option", [option for option in _BOOLEAN if option in INSTALLED_OPTIONS])
def test_boolean_values(option: str) -> None:
    """Which names there are takes a look at the whole file of the provider; which values needs none."""
    for value in ("0", "1", "true", "false", "True", "False"):
        check_options(cuda_options({option: value}), None)
    for value in ("yes", "on", "2", "-1", "", "TRUE", "None", " 1"):
        assert_refused({option: value}, None)


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("arena_extend_strategy", ("kNextPowerOfTwo", "kSameAsRequested"), ("ksameasrequested", "0", "")),
        ("cudnn_conv_algo_search", ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"), ("heuristic", "fast", "")),
        ("device_id", ("0", "7"), ("-1", "cuda:0", "1.0", "", "None", "²", " 1")),
        ("gpu_mem_limit", ("0", "2147483648", str(2**64 - 1)), ("2GB", "-5", "1e9", "", "2_000", "²", "5 ")),
    ],
)
def test_values(option: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    for value in right:
        check_options(cuda_options({option: value}), None)
    for value in wrong:
        assert_refused({option: value}, None)


def assert_refused(options: dict[str, str], provider_library: str | None) -> None:
    ((option, value),) = options.items()
    with pytest.raises(ProviderOptionError, match=option) as caught:
        check_options(cuda_options(options), provider_library)
    assert (caught.value.option, caught.value.value) == (option, value)
    assert caught.value.fixes


@pytest.mark.parametrize("value", ["-1", "cuda:0", "", " 1"])
def test_the_gpu_of_tensorrt_is_a_number_too(value: str) -> None:
    """It names the GPU of the session, as that of CUDA does."""
    with pytest.raises(ProviderOptionError, match="the TensorRT provider's option 'device_id'") as caught:
        check_options(ProviderList((TENSORRT, CUDA), {TENSORRT: {"device_id": value}}), None)
    assert (caught.value.provider, caught.value.option, caught.value.value) == (TENSORRT, "device_id", value)


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
def test_any_option_is_let_through_or_refused(provider_library: str, name: str, value: str) -> None:
    refusal = attempt(lambda: check_options(cuda_options({name: value}), provider_library))
    assert refusal is None or (type(refusal) is ProviderOptionError and refusal.option == name)


def test_an_option_that_only_newer_releases_have_is_not_suggested(stubs: Stubs) -> None:
    """1.23.2 has no enable_cudnn: to mean the very same, or enable_cuda_graph, would be an answer to nothing."""
    names = 'const char *const names[] = {"device_id", "enable_cuda_graph"};\n'
    older = stubs.compile("libonnxruntime_providers_older.so", names)
    with pytest.raises(ProviderOptionError) as caught:
        check_options(cuda_options({"enable_cudnn": "1"}), str(older))
    assert "knows no option 'enable_cudnn'" in caught.value.summary
    assert "did you mean" not in caught.value.summary
    assert caught.value.fixes == ("remove 'enable_cudnn', or install a release that has it",)
