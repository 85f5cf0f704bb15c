"""What the dynamic loader says of libraries that are whole: which of them, why, and what mends it."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.environment.libraries import loader_words
from ortgpu.environment.libraries.search import Candidate
from ortgpu.errors import GPUError
from ortgpu.provider.preloading import MissingLibrary
from tests.faults.case import library, own_path
from tests.lab.fixtures import Lab
from tests.support.children import run_child
from tests.support.made_facts import (
    HEALTHY,
    PROVIDER,
    SITE,
    Change,
    all_of,
    observed,
    part,
    preloaded,
    probed,
    probed_without,
    variables,
)

TLS = "cannot allocate memory in static TLS block"
UNFIT = "undefined symbol: cublasLtZZZMatmul, version libcublasLt.so.13"
MAPPED = "failed to map segment from shared object"


def first(*changes: Change) -> GPUError:
    return find_problems(all_of(*changes)(HEALTHY))[0]


def passed_over(soname: str, problem: str, unfit_for: str | None = None) -> MissingLibrary:
    path = f"/venv/nvidia/cu13/lib/{soname}"
    file = Candidate(soname, path, "nvidia wheels", "/venv/nvidia", f"{path}: {problem}", unfit_for)
    return MissingLibrary(soname, True, "nvidia-cublas~=13.0", (file,))


def test_what_has_no_room_for_its_thread_storage_is_loaded_at_the_start() -> None:
    error = first(preloaded(missing=(passed_over("libcublas.so.13", TLS),)), variables(LD_PRELOAD="/a.so"))
    assert error.code == "library-not-found"
    assert list(error.fixes) == ["export LD_PRELOAD=/venv/nvidia/cu13/lib/libcublas.so.13:/a.so"]


def test_the_provider_has_no_room_for_its_thread_storage_either() -> None:
    error = first(preloaded(), observed(provider_error=f"{PROVIDER}: {TLS}"))
    assert error.code == "broken-package"
    assert list(error.fixes) == [f"export LD_PRELOAD={PROVIDER}"]


def test_the_file_that_is_named_has_no_room_not_the_one_that_links_it() -> None:
    error = first(observed(import_error=f"ImportError: /site/torch.libs/libgomp-d22c30c5.so.1: {TLS}"))
    assert error.code == "broken-package"
    assert list(error.fixes) == ["export LD_PRELOAD=/site/torch.libs/libgomp-d22c30c5.so.1"]


MUCH = """
static __thread char much[4 << 20] __attribute__((tls_model("initial-exec")));
char *touch(void) { return much; }
"""

ASK = """
import ortgpu
problems = ortgpu.diagnose(probe=True).problems
report([str(fix) for problem in problems if "libcufft" in str(problem) for fix in problem.fixes if "LD_" in fix])
"""


def test_loaded_at_the_start_there_is_room(lab: Lab) -> None:
    """With the real loader, and without an auditor in it, which leaves no room for LD_PRELOAD either."""
    machine = lab.machine(env={"LD_AUDIT": None})
    path = own_path(machine.overlay, library("libcufft"))
    made = lab.stubs.compile("much_storage", MUCH, f"-Wl,-soname,{path.rpartition('/')[2]}")
    machine.overlay.replace(path, made)
    (fix,) = machine.run(ASK).ok().json
    assert str(machine.overlay.site / path) in fix
    assert machine.run(ASK, first=fix).ok().json == []


@pytest.mark.parametrize(
    "words",
    [
        f"{MAPPED}: Permission denied",
        f"{MAPPED}: Operation not permitted",
        "cannot restore segment prot after reloc: Permission denied",
        "cannot change memory protections: Permission denied",
        "cannot make segment writable for relocation: Permission denied",
    ],
)
def test_what_may_not_be_mapped_may_be_read(words: str) -> None:
    """SELinux, or a file system without execution: chmod changes neither."""
    error = first(preloaded(missing=(passed_over("libcublas.so.13", words),)))
    assert [fix.kind for fix in error.fixes] == ["manual"]
    assert "SELinux" in error.fixes[0]


@pytest.mark.parametrize(
    ("folder", "fix", "needs"),
    [
        ("/opt/older", "export LD_LIBRARY_PATH=/b", None),
        ("/opt/unknown", "update the package that brings /opt/unknown/libstdc++.so.6, or load", None),
        ("/usr/lib/x86_64-linux-gnu", "use a newer operating system", "host"),
    ],
)
def test_a_cpp_library_that_is_too_old_is_not_mended_by_installing_cublas(
    folder: str, fix: str, needs: str | None
) -> None:
    words = f"{folder}/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by /x/libcublas.so.13)"
    missing = (passed_over("libcublas.so.13", words),)
    (only,) = first(preloaded(missing=missing), variables(LD_LIBRARY_PATH="/opt/older:/b")).fixes
    assert only.startswith(fix)
    assert only.needs == needs


@pytest.mark.parametrize(
    ("folder", "code", "fix"),
    [
        ("/opt/miniconda/lib", "library-version", "update the package that brings /opt/miniconda/lib/libstdc++.so.6"),
        ("/lib/x86_64-linux-gnu", "unsupported-platform", "use a newer operating system"),
    ],
)
def test_a_cpp_library_that_is_too_old_for_the_provider(folder: str, code: str, fix: str) -> None:
    """Pull request 11383, ultralytics issue 21757, with the provider in the place of the module."""
    words = f"{folder}/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by {PROVIDER})"
    error = first(preloaded(), observed(provider_error=words))
    assert error.code == code
    assert error.fixes[0].startswith(fix)
    assert error.evidence[0] == words


def test_a_part_of_onnx_runtime_that_the_provider_lacks_is_the_packages() -> None:
    """freshtechyy/ONNX-Runtime-GPU-image-classifciation-example issue 1."""
    words = "libonnxruntime_providers_shared.so: cannot open shared object file: No such file or directory"
    error = first(preloaded(), observed(provider_error=words))
    assert error.code == "broken-package"
    assert "onnxruntime-gpu==" in error.fixes[0]


def test_a_copy_that_does_not_fit_what_is_loaded_is_not_installed_again() -> None:
    missing = (passed_over("libcublas.so.13", UNFIT, "/opt/cuda/libcublasLt.so.13"),)
    error = first(preloaded(missing=missing))
    assert error.code == "library-conflict"
    assert "in this process: /opt/cuda/libcublasLt.so.13" in error.evidence
    assert error.details()["libraries"] == ("/opt/cuda/libcublasLt.so.13",)
    assert [fix.kind for fix in error.fixes] == ["manual"]
    loaded_by = variables(LD_PRELOAD="/a.so:/opt/cuda/libcublasLt.so.13")
    assert list(first(preloaded(missing=missing), loaded_by).fixes) == ["export LD_PRELOAD=/a.so"]


@pytest.mark.parametrize(
    "words",
    [
        "undefined symbol: cublasLtGetStatusString, version libcublasLt.so.13",  # SHI-Labs/FcF-Inpainting issue 34
        # zai-org/ChatGLM-6B issue 921, onnxruntime issue 8594: other releases of glibc
        "symbol cublasLtGetStatusString, version libcublasLt.so.13 not defined in file libcublasLt.so.13 with link "
        "time reference",
        "symbol free_gemm_select version libcublasLt.so.13 not defined in file libcublasLt.so.13 with link time "
        "reference",
    ],
)
def test_a_library_that_lacks_a_function_is_of_another_version(words: str) -> None:
    for change in (
        all_of(preloaded(), observed(provider_error=f"/x/libcublas.so.13: {words}")),
        preloaded(missing=(passed_over("libcublas.so.13", words),)),
    ):
        error = first(change)
        assert error.code == "library-version"
        assert error.details()["needed"] == ("libcublasLt.so.13",)
        assert "--force-reinstall" in error.fixes[0]
        assert "nvidia-cublas" in error.fixes[0]
    imported = (
        f"ImportError: {SITE}/onnxruntime/capi/onnxruntime_pybind11_state.so: {words}"  # 1.27.0 links CUDA itself
    )
    assert first(preloaded(), observed(import_error=imported)).code == "library-version"


def test_beside_it_what_is_absent_is_installed() -> None:
    missing = (
        passed_over("libcublas.so.13", UNFIT, "/opt/cuda/libcublasLt.so.13"),
        MissingLibrary("libcurand.so.10", True, "nvidia-curand~=10.0", ()),
    )
    error = first(preloaded(missing=missing))
    assert error.code == "library-not-found"
    assert [fix.kind for fix in error.fixes] == ["manual", "shell"]
    assert "nvidia-cublas" not in error.fixes[1]


@pytest.mark.parametrize(
    "name",
    [
        "libstdc++.so.6",
        "libgomp.so.1",
        "libfoo-1.2.so.3",
        "libnvdla_compiler.so",  # dusty-nv/jetson-inference issue 1920: of a Jetson's driver, as no wheel has it
        "libnvinfer.so.5",  # Azure-Samples/onnxruntime-iot-edge issue 17: a build that links TensorRT
    ],
)
def test_a_library_of_the_system_is_not_the_packages(name: str) -> None:
    error = first(observed(import_error=f"ImportError: {name}: cannot open shared object file: No such file"))
    assert error.code == "library-not-found"
    assert error.details()["missing"] == (name,)
    assert [fix.needs for fix in error.fixes] == ["root"]


@pytest.mark.parametrize(
    "words",
    [
        # issue 12439, IrosTheBeggar/mStream pull request 718
        "Error loading shared library ld-linux-x86-64.so.2: No such file or directory (needed by /x/libonnxruntime.so)",
        # issues 17986 and 22539, with libc6-compat or gcompat
        "Error relocating /x/libonnxruntime.so: __vsnprintf_chk: symbol not found",
    ],
)
def test_another_c_library_is_not_mended_by_installing_onnx_runtime(words: str) -> None:
    error = first(observed(import_error=f"ImportError: {words}"), part("host", libc=None, os_name="Alpine Linux v3.20"))
    assert error.code == "unsupported-platform"
    (only,) = error.fixes
    assert "glibc" in only
    assert only.needs == "host"


def test_a_library_of_onnx_runtime_is_the_packages() -> None:
    text = "ImportError: libonnxruntime.so.1: cannot open shared object file: No such file"
    assert first(observed(import_error=text)).code == "broken-package"


def test_numpy_is_whole_where_nothing_can_be_mapped() -> None:
    """The probe loads CUDA first, and NumPy says only that it failed."""
    lost = (replace(passed_over("libcufft.so.12", MAPPED), required=False),)
    failed = all_of(observed(import_error="ImportError: import numpy failed"), probed_without(*lost))
    error = first(failed, part("host", address_space=1 << 30))
    assert error.code == "broken-package"
    assert "RLIMIT_AS" in error.fixes[0]
    assert any(MAPPED in line for line in error.evidence)
    assert "numpy" in first(observed(import_error="ImportError: import numpy failed")).fixes[0]


def test_a_session_knows_why_numpy_fails(lab: Lab) -> None:
    """ONNX Runtime prints NumPy's reason, and raises "import numpy failed"."""
    machine = lab.machine()
    extension = own_path(machine.overlay, "numpy/_core/_multiarray_umath.*.so")
    refusing = lab.stubs.compile("refusing", "extern int absent(void); int (*taken)(void) = absent;\n")
    machine.overlay.replace(extension, refusing)
    error = machine.open_session(lab.models.relu).error
    assert error is not None
    assert any("undefined symbol: absent" in line for line in error.evidence), error.text
    assert "numpy==" in error.fixes[0]
    lost = f"ImportError: /other/numpy/_core/_multiarray_umath.so: {MAPPED}"
    mapped = first(observed(import_error="ImportError: import numpy failed", numpy_error=lost))
    assert "file system of /other/numpy/_core without noexec" in mapped.fixes[0]


@pytest.mark.parametrize(("limits", "named"), [({}, "RLIMIT_DATA"), ({"address_space": 50 << 20}, "RLIMIT_AS")])
def test_where_memory_is_limited_a_crash_of_the_loader_is_not_the_file_s(limits: dict[str, int], named: str) -> None:
    """glibc takes no mapping for granted while it links a library, and still dies of one that it did not get."""
    crashed = probed(died_in="libraries", opening=f"{SITE}/nvidia/cu13/lib/libcublasLt.so.13")
    error = first(crashed, part("host", data=200 << 20, **limits))
    assert error.code == "broken-package"
    assert named in error.fixes[0]
    assert "pip install" in first(crashed).fixes[0]


def test_long_words_are_read_in_no_time() -> None:
    """Words that end in the middle, of a log that somebody pastes: no pattern tries each of their beginnings."""
    run_child([sys.executable, "-m", "tests.programs.long_texts"], deadline=120).ok()


# What Linux's and Windows' loaders say, and what that is. Each text is of one kind alone.
SAID = {
    "x.dll: Operation did not complete successfully because the file contains a virus (error 225)": "is_blocked",
    "x.dll: This program is blocked by group policy (error 1260)": "is_blocked",
    "x.dll: Your organization used Device Guard: it has blocked this file (error 4551)": "is_blocked",
    "libx.so: cannot open shared object file: Operation not permitted": "is_blocked",
    "libx.so: cannot open shared object file: Permission denied": "may_not_be_read",
    "libx.so: failed to map segment from shared object: Permission denied": "cannot_be_mapped",
    "libx.so: failed to map segment from shared object: Operation not permitted": "cannot_be_mapped",
    "The paging file is too small for this operation to complete (error 1455)": "cannot_be_mapped",
    "The filename or extension is too long (error 206)": "has_long_path",
    "Error loading shared library ld-linux-x86-64.so.2: No such file": "is_musl",
    "RuntimeError: can't start new thread": "lacks_threads",
    "libx.so: cannot allocate memory in static TLS block": "lacks_thread_storage",
}
KINDS = sorted(set(SAID.values()))


@pytest.mark.parametrize("words", SAID)
def test_each_word_of_a_loader_is_of_one_kind(words: str) -> None:
    found = [kind for kind in KINDS if getattr(loader_words, kind)(words)]
    assert found == [SAID[words]]
