"""What fixes say, over made facts. That they are true is shown in test_advice.py, on the environments they are for."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.facts import Facts
from ortgpu.diagnosis.remedies import fixes as remedies
from ortgpu.diagnosis.remedies import releases
from ortgpu.environment.inspection import Environment
from ortgpu.environment.libraries.catalogue import BY_STEM
from ortgpu.environment.packages.installed import Distribution
from ortgpu.environment.packages.installer import Manager
from ortgpu.environment.variables import Variables
from ortgpu.errors import GPUError
from ortgpu.provider.preloading import MissingLibrary
from tests.support.made_facts import (
    CPU_ENGINE,
    CPU_ENGINE_THERE,
    ENGINE,
    HEALTHY,
    NO_ENGINE,
    NO_PROVIDER,
    SEEN_HEALTHY,
    SITE,
    SYMBOL,
    Change,
    all_of,
    engine,
    observed,
    part,
    variables,
)
from tests.support.made_facts import environment as part_of_environment

PIP = "/venv/bin/python -m pip"


def environment(**variables: str) -> Environment:
    return replace(HEALTHY.environment, variables=Variables(variables, variables))


def first(facts: Facts) -> GPUError:
    return find_problems(facts)[0]


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("/a", "unset PYTHONPATH"),
        ("/a:", "unset PYTHONPATH"),
        ("/b:/a/:/c", "export PYTHONPATH=/b:/c"),
        ("/b c:/a", "export PYTHONPATH='/b c'"),
        ("/ab:/b", None),
        ("", None),
    ],
)
def test_a_folder_is_taken_off_a_search_path(value: str, fix: str | None) -> None:
    assert remedies.drop_from_variable(environment(PYTHONPATH=value), "PYTHONPATH", "/a") == fix


def test_a_folder_is_not_on_a_path_that_is_not_set() -> None:
    assert remedies.drop_from_variable(environment(), "PYTHONPATH", "/a") is None


def test_a_file_is_not_loaded_at_the_start() -> None:
    preloaded = environment(LD_PRELOAD="/a/libcuda.so /b.so:/c.so")
    assert remedies.drop_from_variable(preloaded, "LD_PRELOAD", "/a/libcuda.so") == "export LD_PRELOAD=/b.so:/c.so"


@pytest.mark.parametrize(
    ("before", "after"), [(None, "/a b"), ("", "/a b"), ("/c", "/a b:/c"), ("/c d:/e", "/a b:/c d:/e")]
)
def test_a_folder_that_is_looked_in_first_brings_no_working_directory(before: str | None, after: str) -> None:
    """As an empty entry of LD_LIBRARY_PATH would."""
    variables = {} if before is None else {"LD_LIBRARY_PATH": before}
    said = f'{remedies.prepend_library_path("/a b")}; printf %s "$LD_LIBRARY_PATH"'
    assert (
        subprocess.run(["/bin/sh", "-c", said], env=variables, capture_output=True, check=True).stdout == after.encode()
    )


def test_a_frozen_program_is_not_told_to_run_pip() -> None:
    """Its executable is the program: with `-m pip install` it would start once more."""
    frozen = replace(HEALTHY.environment, host=replace(HEALTHY.environment.host, frozen=True))
    for fix in (
        remedies.install(frozen, ["numpy"]),
        remedies.reinstall_onnxruntime(frozen),
        remedies.install_libraries(frozen, ["nvidia-cublas"]),
        remedies.other_release(frozen, releases.FOR_CUDA_12),
    ):
        assert not fix.executable
        assert "frozen" in fix
        assert "leave out" not in fix
        assert PIP not in fix


def test_an_environment_for_one_run_is_made_of_something_else() -> None:
    passing = replace(HEALTHY.environment, installer=replace(HEALTHY.environment.installer, for_one_run=True))
    for fix in (remedies.install(passing, ["numpy<2"]), remedies.install_libraries(passing, ["numpy<2"])):
        assert fix.endswith("add --with 'numpy<2' to uv run")
        assert not fix.executable


def test_a_lock_file_is_told_of_what_is_new() -> None:
    """What pip installs is gone with the next sync. What is damaged, the lock file names already."""
    manager = Manager("poetry", "/app/poetry.lock", "poetry add")
    managed = replace(HEALTHY.environment, installer=replace(HEALTHY.environment.installer, manager=manager))
    assert remedies.install(managed, ["numpy<2"]) == "poetry add 'numpy<2'"
    assert remedies.other_release(managed, releases.FOR_CUDA_12).startswith("poetry add 'onnxruntime-gpu>=1.20,<1.27' ")
    again = remedies.install(managed, ["numpy==2.4.6"], again=True)
    assert again == f"{PIP} install --force-reinstall --no-deps numpy==2.4.6"


def test_a_name_that_is_on_record_twice_is_removed_twice() -> None:
    """pip removes one record at a time; what is installed again is the version that the files are of."""
    owners = (replace(ENGINE, version="1.28.0"), ENGINE)
    packages = HEALTHY.environment.packages
    both = replace(packages, onnxruntime=replace(packages.onnxruntime, owners=owners))
    fix = remedies.reinstall_onnxruntime(replace(HEALTHY.environment, packages=both))
    assert fix.split(" && ") == [
        f"{PIP} uninstall -y onnxruntime-gpu",
        f"{PIP} uninstall -y onnxruntime-gpu",
        f"{PIP} install onnxruntime-gpu==1.31.1",
    ]


def test_who_may_not_write_is_told_who_may() -> None:
    here = HEALTHY.environment
    obstacle = f"{SITE} is not this user's to write: as its owner"
    closed = replace(here, installer=replace(here.installer, obstacle=obstacle))
    for fix in (
        remedies.install(closed, ["numpy"]),
        remedies.reinstall_onnxruntime(closed),
        remedies.install_libraries(closed, ["nvidia-cublas~=13.0"]),
    ):
        assert (fix.kind, fix.needs) == ("manual", "root")
        assert fix.startswith(f"{obstacle}, run {PIP} ")


def test_sources_and_builds_of_somebody_are_not_deleted() -> None:
    """An editable install, or a folder that no installer knows: it is only taken off the search path."""
    here = environment(PYTHONPATH="/src")
    editable = replace(ENGINE, location="/elsewhere", folder="onnxruntime_gpu-1.31.1.dist-info")
    develop = replace(ENGINE, location="/src", folder="onnxruntime_gpu.egg-info", record_readable=False)
    for owners in ((editable,), (develop,), ()):
        engine = replace(here.packages.onnxruntime, folder="/src/onnxruntime", owners=owners)
        packages = replace(here.packages, onnxruntime=engine)
        fix = remedies.reinstall_onnxruntime(
            replace(here, packages=packages, installer=replace(here.installer, own=(SITE,)))
        )
        assert fix.startswith("unset PYTHONPATH && ")
        assert "rm " not in fix
        assert "rm " not in remedies.reinstall_onnxruntime(replace(here, packages=packages))


def test_packages_of_the_system_are_left_to_it() -> None:
    """Debian's python3-onnxruntime has no RECORD, and pip installs into a folder that comes before its own."""
    system, own = "/usr/lib/python3/dist-packages", "/usr/local/lib/python3.13/dist-packages"
    of_debian = replace(CPU_ENGINE, location=system, folder="onnxruntime-1.21.0.dist-info", record_readable=False)
    facts = all_of(
        NO_PROVIDER,
        engine(folder=f"{system}/onnxruntime", build_name="onnxruntime", owners=(of_debian,), cuda_version=None),
        part("installer", folder=own, own=(own, system), hidden=(system,)),
    )(HEALTHY)
    fix = remedies.reinstall_onnxruntime(facts.environment)
    assert "rm -rf" not in fix
    assert "pip install --force-reinstall --no-deps 'onnxruntime-gpu" in fix


def test_what_a_release_needs_is_installed_with_it() -> None:
    """The next error would else name it."""
    libraries = "nvidia-cuda-runtime~=13.0 nvidia-cublas~=13.0 nvidia-curand~=10.0 nvidia-nvjitlink~=13.0"
    rest = "nvidia-cuda-nvrtc~=13.0 nvidia-cufft~=12.0 nvidia-cudnn-cu13~=9.0"
    all_of_them = [f"'{each}'" for each in f"onnxruntime-gpu>=1.28 {libraries} {rest}".split()]

    def fix(there: tuple[str, ...], *changes: Any) -> list[str]:
        nothing = all_of(NO_ENGINE, part_of_environment(libraries_by_cuda={13: there, 12: tuple(BY_STEM)}), *changes)
        return list(first(nothing(HEALTHY)).fixes)

    assert fix(()) == [f"{PIP} install {' '.join(all_of_them)}"]
    assert fix(tuple(BY_STEM)) == [f"{PIP} install {all_of_them[0]}"]
    assert fix(tuple(set(BY_STEM) - {"libcudnn", "libcurand"})) == [
        f"{PIP} install {all_of_them[0]} {all_of_them[3]} {all_of_them[-1]}"
    ]
    assert fix(("libcudnn",)) == fix(()), "it is that of another CUDA"
    assert fix(
        (), part("driver", cuda_version=(12, 4), nvml=replace(HEALTHY.environment.driver.nvml, cuda_version=(12, 4)))
    ) == [f"{PIP} install 'onnxruntime-gpu>=1.20,<1.27'"]
    cpu = all_of(CPU_ENGINE_THERE, part_of_environment(libraries_by_cuda={13: ()}))
    assert first(cpu(HEALTHY)).fixes[0] == f"{PIP} uninstall -y onnxruntime && {PIP} install {' '.join(all_of_them)}"


def test_links_that_stop_pip_are_removed_first() -> None:
    fix = remedies.install_libraries(HEALTHY.environment, ["nvidia-cublas~=13.0"], ["/a b/nvidia"])
    assert fix == (
        "find '/a b/nvidia' -type l ! -exec test -e {} ';' -delete && "
        f"{PIP} install --force-reinstall --no-deps nvidia-cublas==13.1.0"
    )
    assert remedies.install_libraries(HEALTHY.environment, ["nvidia-curand~=10.0"]) == (
        f"{PIP} install 'nvidia-curand~=10.0'"
    )


def test_a_wheel_of_another_major_version_is_not_installed_again() -> None:
    """As PyTorch 2.2 brings cuDNN 8 for CUDA 12: the same version again would have no libcudnn.so.9 either."""
    wheels = (Distribution("nvidia-cudnn-cu12", "8.9.2.26", SITE), Distribution("nvidia-cublas", "14.0.1", SITE))
    packages = replace(HEALTHY.environment.packages, nvidia=wheels)
    environment = replace(HEALTHY.environment, packages=packages)
    wanted = ["nvidia-cudnn-cu12~=9.0", "nvidia-cublas~=13.0"]
    assert remedies.install_libraries(environment, wanted) == f"{PIP} install '{wanted[0]}' '{wanted[1]}'"


def test_one_command_brings_every_library_that_is_missing() -> None:
    assert SEEN_HEALTHY.observed.preload is not None
    missing = (
        MissingLibrary("libcurand.so.10", True, "nvidia-curand~=10.0", ()),
        MissingLibrary("libcufft.so.12", False, "nvidia-cufft~=12.0", ()),
    )
    preload = replace(SEEN_HEALTHY.observed.preload, missing=missing)
    found = first(replace(SEEN_HEALTHY, observed=replace(SEEN_HEALTHY.observed, preload=preload)))
    assert found.code == "library-not-found"
    assert "libcufft" not in found.summary
    assert list(found.fixes) == [f"{PIP} install 'nvidia-curand~=10.0' 'nvidia-cufft~=12.0'"]


@pytest.mark.parametrize(
    ("text", "others", "version", "summary", "fix"),
    [
        ("ImportError: import numpy failed", (), "1.31.1", "numpy, which it needs, is not installed", "install numpy"),
        (
            "ImportError: import numpy failed",
            (Distribution("numpy", "2.3.0", SITE),),
            "1.31.1",
            "the installed numpy 2.3.0 cannot be imported",
            "install --force-reinstall --no-deps numpy==2.3.0",
        ),
        (
            "ImportError: numpy.core.multiarray failed to import",
            (Distribution("numpy", "2.3.0", SITE),),
            "1.18.1",
            "ONNX Runtime 1.18.1 is too old for numpy 2.3.0",
            "install 'numpy<2'",
        ),
        (
            "ImportError",  # NumPy prints its reason, and raises this without a word
            (Distribution("numpy", "2.3.0", SITE),),
            "1.18.1",
            "ONNX Runtime 1.18.1 is too old for numpy 2.3.0",
            "install 'numpy<2'",
        ),
        ("ModuleNotFoundError: No module named 'google.protobuf'", (), "1.31.1", "protobuf, which", "install protobuf"),
    ],
)
def test_a_dependency_is_not_blamed_on_onnxruntime(
    text: str, others: tuple[Distribution, ...], version: str, summary: str, fix: str
) -> None:
    packages = HEALTHY.environment.packages
    packages = replace(packages, others=others, onnxruntime=replace(packages.onnxruntime, build_version=version))
    facts = replace(
        HEALTHY,
        environment=replace(HEALTHY.environment, packages=packages),
        observed=replace(HEALTHY.observed, import_error=text),
    )
    found = first(facts)
    assert summary in found.summary
    assert list(found.fixes) == [f"{PIP} {fix}"]


def test_what_onnxruntime_itself_lacks_is_onnxruntimes() -> None:
    text = "ModuleNotFoundError: No module named 'onnxruntime.capi._pybind_state'"
    found = first(replace(HEALTHY, observed=replace(HEALTHY.observed, import_error=text)))
    assert "uninstall -y onnxruntime-gpu" in found.fixes[0]


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        (
            (part("packages", nvidia=(
                Distribution("nvidia-cublas", "13.1.0", "/first", altered_files=("nvidia/cu13/lib/libcublas.so.13",)),
            )),),
            f"unset PYTHONPATH && {PIP} install --force-reinstall --no-deps nvidia-cublas==13.1.0",
        ),
        (
            (part("packages", nvidia=(Distribution("nvidia-cublas", "13.0.1", "/first"),)),
             observed(provider_error=SYMBOL)),
            "unset PYTHONPATH",
        ),
        (
            (part("packages", others=(Distribution("numpy", "2.3.0", "/first"),)), engine(build_version="1.18.1"),
             observed(import_error="ImportError")),
            f"{PIP} install --target /first --upgrade --force-reinstall --no-deps 'numpy<2'",
        ),
        (
            (part("packages", others=(Distribution("numpy", "2.4.6", "/first"),)),
             observed(import_error="RuntimeError: NumPy was built with baseline optimizations")),
            f"{PIP} install --target /first --upgrade --force-reinstall --no-deps 'numpy<2.4'",
        ),
    ],
)  # fmt: skip
def test_what_comes_first_does_not_stay(changes: tuple[Change, ...], fix: str) -> None:
    """What an installer brings is found after a folder of PYTHONPATH. pip --target would empty the folder nvidia."""
    moved = tuple(
        replace(each, candidates=tuple(
            replace(file, path=file.path.replace(SITE, "/first"), root="/first/nvidia") for file in each.candidates
        ))
        for each in HEALTHY.environment.libraries
    )  # fmt: skip
    there = (part_of_environment(libraries=moved), variables(PYTHONPATH="/first"), part("installer", own=(SITE,)))
    assert first(all_of(*there, *changes)(HEALTHY)).fixes[0] == fix


def test_a_cpu_package_that_no_installer_sees_is_not_uninstalled() -> None:
    folder = replace(
        HEALTHY.environment.packages.onnxruntime,
        folder="/elsewhere/onnxruntime",
        owners=(replace(CPU_ENGINE, location="/elsewhere"),),
        build_name="onnxruntime",
        provider_library=None,
    )
    shadowing = replace(folder, elsewhere=(ENGINE,))

    def fixes(**changes: Any) -> list[str]:
        changed = replace(environment(PYTHONPATH="/elsewhere"), provider=None, libraries=(), **changes)
        return list(first(replace(HEALTHY, environment=changed)).fixes)

    packages = HEALTHY.environment.packages
    assert fixes(packages=replace(packages, onnxruntime=shadowing)) == ["unset PYTHONPATH"]
    alone = fixes(packages=replace(packages, onnxruntime=folder))
    assert alone[0] == f"unset PYTHONPATH && {PIP} install 'onnxruntime-gpu>=1.28'"
    assert "CUDA as a plugin for ONNX Runtime 1.31.1" in alone[1]
    assert len(alone) == 2
    elsewhere = fixes(packages=replace(packages, onnxruntime=shadowing), variables=Variables({}, {}))
    assert elsewhere == ["take /elsewhere off the search path of this program"]


def test_a_whole_package_that_ends_the_process_is_not_installed_again() -> None:
    """1.24.1 ends a process without /proc at its import, 1.29.0 one without /bin (issue 32501), and others do not."""
    assert SEEN_HEALTHY.observed.probe is not None
    died = replace(SEEN_HEALTHY.observed.probe, completed=False, died_in="import", steps=(), signal="SIGABRT")
    facts = replace(SEEN_HEALTHY, observed=replace(SEEN_HEALTHY.observed, probe=died))
    assert list(first(facts).fixes) == [f"{PIP} install 'onnxruntime-gpu>=1.28,!=1.31.1'"]


@pytest.mark.parametrize("symbol", ["cuTensorMapEncodeTiled", "cuMemCreate"])
@pytest.mark.parametrize(
    "words",
    [
        "/x/libonnxruntime_providers_cuda.so: undefined symbol: {}",
        "it takes {} from nvcuda.dll, and C:\\nvcuda.dll of this process does not have that (error 127)",
    ],
)
def test_a_function_of_the_driver_is_looked_for_in_the_driver(symbol: str, words: str) -> None:
    text = words.format(symbol)
    found = first(replace(SEEN_HEALTHY, observed=replace(SEEN_HEALTHY.observed, provider_error=text)))
    assert found.code == "driver-too-old"
    assert symbol in found.summary
    assert [fix.needs for fix in found.fixes] == ["driver"]


@pytest.mark.parametrize("symbol", ["cublasCreate_v2", "cudaMalloc", "cudnnCreate", "curandCreateGenerator"])
def test_a_function_of_a_library_is_not(symbol: str) -> None:
    text = f"/x/libonnxruntime_providers_cuda.so: undefined symbol: {symbol}"
    found = first(replace(SEEN_HEALTHY, observed=replace(SEEN_HEALTHY.observed, provider_error=text)))
    assert found.code == "library-version"


def test_a_c_library_that_is_too_old_explains_nothing_else() -> None:
    facts = replace(
        HEALTHY,
        environment=replace(
            HEALTHY.environment, driver=replace(HEALTHY.environment.driver, libcuda=None, libcuda_error="absent")
        ),
        observed=replace(HEALTHY.observed, import_error="ImportError: /lib/libc.so.6: version `GLIBC_2.99' not found"),
    )
    problems = find_problems(facts)
    assert [problem.code for problem in problems[:2]] == ["unsupported-platform", "driver-not-found"]
    assert problems[1].consequence_of is None


@pytest.mark.parametrize(
    ("where", "code"), [("/opt/conda/lib", "library-version"), ("/usr/lib", "unsupported-platform")]
)
def test_a_cpp_library_of_somebody_else_is_told_from_the_systems(where: str, code: str) -> None:
    text = f"ImportError: {where}/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /x.so)"
    found = first(replace(HEALTHY, observed=replace(HEALTHY.observed, import_error=text)))
    assert found.code == code
    assert "GLIBCXX_3.4.32" in str(found)


@pytest.mark.parametrize(
    ("version", "requirement"),
    [
        ("1.31.1", "onnxruntime-gpu==1.31.1"),
        ("1.31.1.post1", "onnxruntime-gpu==1.31.1.post1"),
        ("1.31.1+cu130", "onnxruntime-gpu==1.31.1"),
        ("1.32.0.dev20261101001", "onnxruntime-gpu"),
        (None, "onnxruntime-gpu"),
    ],
)
def test_only_versions_that_an_index_has_are_asked_for(version: str | None, requirement: str) -> None:
    assert remedies.published("onnxruntime-gpu", version) == requirement
