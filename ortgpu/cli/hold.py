"""``ortgpu hold``: keep later installations from putting ONNX Runtime's CPU package over its GPU package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import click

from ortgpu.cli import output, signals
from ortgpu.cli.other_python import diagnose_in, python_option
from ortgpu.diagnosis.remedies.fixes import why_not_held
from ortgpu.environment.child import interpreter
from ortgpu.environment.inspection import Environment
from ortgpu.environment.packages.installed import Distribution
from ortgpu.errors import ConflictingPackagesError

_METADATA = """\
Metadata-Version: 2.1
Name: onnxruntime
Version: {version}
Summary: Stands for onnxruntime-gpu, so that no installer puts onnxruntime over it. `ortgpu hold --release` removes it.
Requires-Dist: onnxruntime-gpu
"""
_WHEEL = """\
Wheel-Version: 1.0
Generator: ortgpu hold
Root-Is-Purelib: true
Tag: py3-none-any
"""


@click.command()
@click.option("--release", is_flag=True, help="Remove what this command has written.")
@python_option
def hold(release: bool, python: str | None) -> int:
    """Keep later installations from replacing ONNX Runtime's GPU build by the CPU build.

    Many libraries require `onnxruntime`, the package without CUDA. pip and uv do not know that onnxruntime-gpu is the
    same module, and install the CPU package over the GPU package. This command writes the metadata, and nothing else,
    of a distribution `onnxruntime` with the version of the installed onnxruntime-gpu. The metadata satisfies these
    libraries, so installers leave the GPU build alone. No network and no installer is needed.

    Run it again after an upgrade of onnxruntime-gpu: `ortgpu doctor` says when. The metadata stays when ortgpu is
    uninstalled; --release removes it, and so does `pip uninstall onnxruntime`.

    Exit code 0: the GPU build is held, or with --release, it is not. 1: it cannot be held, and the reason is printed.
    2: wrong usage.
    """
    console = output.stdout()
    with output.progress("Looking at this environment"), signals.raise_on_signals():
        diagnosis = diagnose_in(python or interpreter(), None, timeout=30, probe=False, profile="inference")
    environment = diagnosis.environment
    try:
        if release:
            output.line(console, _release(environment))
            return 0
        if (reason := why_not_held(environment)) is not None:
            output.line(console, f"not held: {reason}", style="bold red")
            return 1
        if any(owner.name == "onnxruntime" for owner in environment.packages.onnxruntime.owners):
            for problem in diagnosis.problems:
                if isinstance(problem, ConflictingPackagesError):
                    output.show_error(console, problem, with_others=False)
            output.line(console, "not held: repair the packages first", style="bold red")
            return 1
        output.line(console, _hold(environment), style="bold green")
    except OSError as error:
        output.line(console, f"not held: {error.filename}: {error.strerror}", style="bold red")
        return 1
    return 0


def _hold(environment: Environment) -> str:
    """Write the metadata for the installed GPU build, remove other metadata, and return a sentence about it."""
    packages = environment.packages
    gpu = next(owner for owner in packages.onnxruntime.owners if owner.name == "onnxruntime-gpu")
    others = [
        distribution
        for distribution in packages.held
        if (distribution.version, distribution.location) != (gpu.version, gpu.location)
    ]
    done = "was held before"
    if len(others) == len(packages.held):
        write_metadata(gpu)
        done = "is held"
    _remove(others)
    return f"onnxruntime-gpu {gpu.version} {done}: libraries that require onnxruntime leave it alone"


def _release(environment: Environment) -> str:
    records = environment.packages.held
    _remove(records)
    if not records:
        return "nothing is held in this environment"
    return f"released: the next library that requires onnxruntime brings the build without CUDA ({records[0].location})"


def write_metadata(gpu: Distribution) -> None:
    """Write the metadata of an `onnxruntime` beside the installed GPU package, whole or not at all."""
    assert gpu.version is not None
    name = f"onnxruntime-{gpu.version.replace('-', '_')}.dist-info"
    files = {"METADATA": _METADATA.format(version=gpu.version), "WHEEL": _WHEEL, "INSTALLER": "ortgpu\n"}
    files["RECORD"] = "".join(f"{name}/{file},,\n" for file in (*files, "RECORD"))
    # Installers take no folder of this name for metadata, so an interrupted write holds nothing.
    unfinished = os.path.join(gpu.location, f".ortgpu-hold-{os.getpid()}")
    os.mkdir(unfinished)
    try:
        for file, text in files.items():
            with open(os.path.join(unfinished, file), "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
        os.rename(unfinished, os.path.join(gpu.location, name))
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _remove(held: Iterable[Distribution]) -> None:
    for distribution in held:
        assert distribution.folder is not None
        shutil.rmtree(os.path.join(distribution.location, distribution.folder))
