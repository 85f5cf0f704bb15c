"""Group D: what is asked of a session, on a machine without a driver: a wrong request is said first all the same."""

from __future__ import annotations

from typing import Any

from tests.faults.case import MENDED, Case, Code, in_group

FORBIDDING_THE_CPU = (
    "import onnxruntime; options = onnxruntime.SessionOptions()\n"
    "options.add_session_config_entry('session.disable_cpu_ep_fallback', '1')"
)
NO_DRIVER = ("driver", "host")


def request(
    name: str,
    says: tuple[str, ...],
    *,
    option: bool = False,
    plain: str = "printed",
    rows: tuple[str, ...] = ("own",),
    **arguments: Any,
) -> Case:
    """A request that is wrong on every machine."""
    error = "ProviderOptionError" if option else "ProviderRequestError"
    return Case(name, error, says, arguments=arguments, cpu=False, plain=plain, rows=rows, needs=("",))


CASES = in_group(
    "D",
    [
        request(
            "provider-cuda",
            ("'cuda'", "CUDAExecutionProvider"),
            providers=["cuda"],
            rows=("D04",),
            plain="warned printed",
        ),
        request(
            "provider-misspelt",
            ("'CudaExecutionProvider'", "CUDAExecutionProvider"),
            providers=["CudaExecutionProvider"],
            rows=("D04",),
            plain="warned printed",
        ),
        request(
            "provider-not-built-in",
            ("ROCMExecutionProvider",),
            providers=["ROCMExecutionProvider"],
            plain="warned printed",
        ),
        request("providers-a-string", ("list",), providers="CUDAExecutionProvider", plain="warned printed"),
        request("providers-a-dict", ("list",), providers={"CUDAExecutionProvider": {}}),
        request("provider-a-number", ("1",), providers=["CUDAExecutionProvider", 1]),
        request("provider-tuple-too-short", ("CUDAExecutionProvider",), providers=[("CUDAExecutionProvider",)]),
        request(
            "provider-options-a-list", ("CUDAExecutionProvider",), providers=[("CUDAExecutionProvider", ["device_id"])]
        ),
        request(
            "options-without-providers", ("provider_options",), provider_options=[{"device_id": 0}], plain="logged"
        ),
        request("options-too-many", ("1 ", "2 "), providers=["CUDAExecutionProvider"], provider_options=[{}, {}]),
        request(
            "option-name",
            ("devise_id", "device_id"),
            option=True,
            providers=[("CUDAExecutionProvider", {"devise_id": 0})],
            rows=("D06",),
            plain="logged",  # it gets no further than the libraries
        ),
        request(
            "option-name-in-provider-options",
            ("devise_id", "device_id"),
            option=True,
            providers=["CUDAExecutionProvider"],
            provider_options=[{"devise_id": 0}],
            rows=("D06",),
            plain="logged",  # it gets no further than the libraries
        ),
        request(
            "option-value-enumerated",
            ("arena_extend_strategy", "kNever", "kSameAsRequested"),
            option=True,
            providers=[("CUDAExecutionProvider", {"arena_extend_strategy": "kNever"})],
            rows=("D06",),
            plain="logged",  # it gets no further than the libraries
        ),
        request(
            "option-value-number",
            ("gpu_mem_limit", "lots"),
            option=True,
            providers=[("CUDAExecutionProvider", {"gpu_mem_limit": "lots"})],
            rows=("D06",),
            plain="logged",  # it gets no further than the libraries
        ),
        request(
            "option-value-boolean",
            ("use_tf32", "maybe"),
            option=True,
            providers=[("CUDAExecutionProvider", {"use_tf32": "maybe"})],
            rows=("D06",),
            plain="logged",  # it gets no further than the libraries
        ),
        request("fallback-asked-for", ("enable_fallback",), enable_fallback=1, plain="logged"),
        # Right requests, on a machine where they cannot be met: the machine is the cause.
        Case(
            "providers-not-named",
            MENDED,
            ("libcuda.so.1",),
            rows=("D01",),
            plain="silent",
            plain_arguments={"providers": None},
            needs=NO_DRIVER,
        ),
        Case(
            "cuda-is-called-available",
            MENDED,
            ("libcuda.so.1",),
            rows=("D02", "D03"),
            prelude=(
                "import onnxruntime\n"
                "assert 'CUDAExecutionProvider' in onnxruntime.get_available_providers()\n"
                "assert onnxruntime.get_device() == 'GPU'"
            ),
            needs=NO_DRIVER,
        ),
        Case(
            "fallback-forbidden-by-argument",
            MENDED,
            ("libcuda.so.1",),
            rows=("D08",),
            plain_arguments={"providers": ["CUDAExecutionProvider"], "enable_fallback": 0},
            arguments={"enable_fallback": 0},
            needs=NO_DRIVER,
        ),
        Case(
            "cpu-forbidden-and-listed",
            MENDED,
            ("libcuda.so.1",),
            rows=("D09",),
            prelude=FORBIDDING_THE_CPU,
            arguments={
                "sess_options": Code("options"),
                "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"],
            },
            cpu=None,
            plain="raised logged",
            needs=NO_DRIVER,
        ),
        Case(
            "cpu-forbidden",
            MENDED,
            ("libcuda.so.1",),
            rows=("D10",),
            prelude=FORBIDDING_THE_CPU,
            arguments={"sess_options": Code("options"), "providers": ["CUDAExecutionProvider"]},
            cpu=None,
            plain="raised logged",
            needs=NO_DRIVER,
        ),
        Case(
            "only-tensorrt-named",
            MENDED,
            ("libcuda.so.1",),
            rows=("B27",),
            arguments={"providers": ["TensorrtExecutionProvider"]},
            plain="printed logged",
            needs=NO_DRIVER,
        ),
    ],
)
