"""The rows of the corpus that are no case of the table: tested somewhere else, on a GPU, or not to be had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["elsewhere", "gpu", "not here"]


@dataclass(frozen=True)
class Row:
    """``where``: the test, as pytest names it from the root of the repository; or the reason why there is none."""

    id: str
    kind: Kind
    where: str


def elsewhere(id_: str, where: str) -> Row:
    return Row(id_, "elsewhere", where)


def gpu(id_: str, where: str) -> Row:
    return Row(id_, "gpu", where)


def not_here(id_: str, why: str) -> Row:
    return Row(id_, "not here", why)


_GUARD = "tests/session/test_guard.py"
_JUDGED = "tests/windows/test_faults.py"
_WINDOWS = f"{_JUDGED}::test_a_case, in tests/faults/WINDOWS.md"

ROWS: tuple[Row, ...] = (
    not_here("A11", "it takes a machine with an aarch64 processor; the advice for it is judged over made facts"),
    not_here("A14", "glibc refuses executable stacks from 2.41 on; the words: tests/diagnosis/test_diagnosis.py"),
    elsewhere("A17", f"{_WINDOWS}: visual-c-missing; {_JUDGED}::test_an_import_of_which_windows_tells_why"),
    gpu("B10", "tests/gpu/test_cudnn.py::test_a_model_with_a_convolution_is_refused"),
    gpu("B11", "tests/gpu/test_refused.py::test_a_transform_without_cufft_is_refused"),
    gpu("B13", "tests/gpu/test_cudnn.py::test_a_model_with_a_convolution_is_refused"),
    elsewhere("B20", f"{_WINDOWS}: cudnn-of-torch-for-cuda-12-and-a-convolution; its like on Linux is "
                     "tests/gpu/test_healthy_variations.py::test_torch_afterwards"),
    not_here("B21", "Windows, and a pair of versions that is not recorded as broken on Linux"),
    not_here("B28", "a provider for another GPU runtime (TensorRT RTX), in releases that are no longer supported"),
    gpu("C11", "tests/gpu/test_refused.py::test_less_than_a_context_takes_is_refused"),
    not_here("C12", "as C11, at the creation of cuDNN: none of the amounts that tests/gpu/test_refused.py leaves is "
                    "known to end there; the words are judged in tests/diagnosis/test_diagnosis_words.py"),
    not_here("C13", "it takes a GPU that the wheel has no code for: the generations are cases here, with made GPUs"),
    not_here("C14", "it takes a GPU for which there is only PTX"),
    not_here("C15", "WSL"),
    not_here("C16", "a display device of the kernel cannot be made here; the line is logged and harms no session, as "
                    "every machine of this table shows"),
    not_here("C17", "it takes a GPU that is defective"),
    not_here("C18", "it takes a GPU that is partitioned; names of partitions are tested in "
                    "tests/provider/test_device_requests.py"),
    elsewhere("D07", f"{_GUARD}::test_set_providers"),
    gpu("D11", "tests/gpu/test_requests.py::test_cuda_goes_first"),
    gpu("D12", "tests/gpu/test_models.py::test_every_computing_node_is_on_cuda"),
    gpu("D13", "tests/gpu/test_models.py::test_every_computing_node_is_on_cuda"),
    gpu("D14", "tests/gpu/test_placement.py::test_reasons_and_copies"),
    gpu("D15", "tests/gpu/test_placement.py::test_known_placements"),
    gpu("D16", "tests/gpu/test_placement.py::test_a_version_newer_than_its_kernel"),
    elsewhere(
        "D17",
        "tests/behaviour/test_broken_environments.py::test_what_is_not_about_the_gpu_stays_onnx_runtimes_own",
    ),
    gpu("D19", "tests/gpu/test_refused.py::test_a_graph_that_cannot_be_captured_is_refused"),
    elsewhere(
        "E01",
        "tests/session/test_running.py, tests/session/test_guard.py::test_failures_while_running_are_typed",
    ),
    gpu("E02", "tests/gpu/test_running.py::test_out_of_memory_is_typed_with_its_sizes"),
    not_here("E03", "a race that corrupts a shape"),
    gpu("E05", "tests/gpu/test_running.py::test_a_sticky_error_names_the_cuda_error"),
    gpu("E06", "tests/gpu/test_pipeline.py::test_captured_results_in_threads"),
    not_here("E07", "it takes a convolution that cuDNN cannot plan on the GPU at hand; the words are judged in "
                    "tests/session/test_running.py"),
    not_here("E08", "it takes a model that cuDNN refuses and ONNX Runtime accepts; the words are judged in "
                    "tests/session/test_running.py"),
    gpu("E09", "tests/gpu/test_pipeline.py::test_the_heuristic_search_is_chosen_unless_the_caller_chose"),
    gpu("E10", "tests/gpu/test_models.py::test_agrees_closely_without_tf32"),
    gpu("E11", "tests/gpu/test_running.py::test_the_first_sessions_of_a_process_in_parallel"),
    not_here("E12", "Windows, in one release"),
    elsewhere("F01", f"{_GUARD}::test_cuda_or_nothing_raises_the_cause"),
    elsewhere("F02", f"{_GUARD}::test_missing_library_is_named"),
    elsewhere("F03", f"{_GUARD}::test_cuda_or_nothing_raises_the_cause"),
    elsewhere("F04", f"{_GUARD}::test_cuda_or_nothing_raises_the_cause"),
    elsewhere("F05", f"{_GUARD}::test_missing_library_is_named"),
    elsewhere("F06", f"{_GUARD}::test_sessions_are_listed_in_order"),
    not_here("F07", "a model that is slower on the GPU runs there as it was asked to: a measurement, and no error"),
    elsewhere("F08", f"{_GUARD}::test_cpu_package_is_named_though_the_library_asks_for_what_that_has"),
    not_here("F09", "a server in C++ that does not go through Python"),
    elsewhere("F10", f"{_GUARD}::test_sessions_are_listed_in_order"),  # what is bound, whatever a program shows
    gpu("G01", "tests/gpu/test_running.py::test_a_child_whose_parent_used_cuda_through_torch_is_told"),
    gpu("G02", "tests/gpu/test_running.py::test_a_child_forked_after_cuda_is_told"),
    elsewhere("G03", f"{_GUARD}::test_pickling"),
    elsewhere(
        "G08",
        "tests/behaviour/test_broken_environments.py, every case: the cause comes without reading the log",
    ),
    elsewhere("W01", f"{_WINDOWS}: no-cublasLt64_13.dll and others"),
    elsewhere("W02", "tests/windows/test_refused.py"),
    elsewhere("W03", f"{_WINDOWS}: cuda-path-is-set-and-leads-to-nothing"),
    not_here("W04", "cuDNN 8 on Windows, which opens zlibwapi.dll itself and ends the process where that is not there"),
    elsewhere("W05", f"{_WINDOWS}: part-of-cudnn-missing-and-a-convolution"),
    elsewhere("W06", f"{_WINDOWS}: toolkit-of-the-right-major-beside-cuda-path-of-another"),
    elsewhere("W07", f"{_WINDOWS}: onnxruntime-of-windows-in-system32; {_JUDGED}::"
                     "test_the_onnxruntime_of_windows_was_taken"),
)  # fmt: skip
