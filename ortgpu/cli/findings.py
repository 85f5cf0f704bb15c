"""The report of a doctor: the problems, then the facts of this machine, a line for each kind; or plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ortgpu import Diagnosis
from ortgpu.cli import output
from ortgpu.diagnosis.probe.result import ProbeResult
from ortgpu.diagnosis.requirements import Requirement, dotted, short_name
from ortgpu.distributed.diagnosis.training import TrainingFacts
from ortgpu.distributed.environment import Mpi, Network
from ortgpu.distributed.environment.shared_folder import FolderMeeting
from ortgpu.environment.gpu.cuda import CudaDevice
from ortgpu.environment.gpu.driver import GPU, LIBCUDA
from ortgpu.environment.inspection import Environment
from ortgpu.environment.libraries.search import Resolution
from ortgpu.environment.packages.installed import Distribution
from ortgpu.errors import GPUError, counted
from ortgpu.provider.requests import CUDA

_CAN_TRAIN = "OK: onnxruntime.training works here, on the CPU; training on a GPU with it is not verified"
_FACTS_SHOWN = 6  # Lines of evidence for each problem; --verbose shows all.
_LONG = 70  # The most characters that are shown of a variable's value.
# Only --verbose shows these variables and packages.
_HARDLY_TELLING = frozenset({"PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "flatbuffers", "protobuf", "nvidia-ml-py"})


@dataclass(frozen=True, slots=True)
class Report:
    model: str | None
    diagnosis: Diagnosis
    requirements: tuple[Requirement, ...]

    @property
    def ok(self) -> bool:
        """True if there is no fatal problem, and the probe, if any, opened a session."""
        return self.diagnosis.ok and self.failure is None

    @property
    def failure(self) -> str | None:
        """The failed step of the probe, with the first line of its message or of the child's output; else None."""
        probe = self.diagnosis.probe
        if probe is None:
            return None
        failed = next((step for step in probe.steps if not step.ok), None)
        name = failed.name if failed is not None else None if probe.completed else probe.died_in
        message = failed.detail if failed is not None else probe.output
        return ", ".join((name, *message.strip().splitlines()[:1])) if name else None

    @property
    def causes(self) -> list[GPUError]:
        problems = self.diagnosis.problems
        return [problem for problem in problems if problem.severity == "fatal" and problem.consequence_of is None]

    def document(self) -> dict[str, Any]:
        diagnosis = self.diagnosis.as_dict()
        return {
            **output.document(ok=self.ok, model=self.model),
            "problems": diagnosis["problems"],
            "requirements": [requirement.as_dict() for requirement in self.requirements],
            "environment": diagnosis["environment"],
            "probe": diagnosis["probe"],
            **({"training": diagnosis["training"]} if "training" in diagnosis else {}),
        }

    def show(self, console: Console, *, verbose: bool = False) -> None:
        """Show the problems, then the facts. The verdict is the last line, where a terminal shows it."""
        self._show_problems(console, verbose)
        if self.diagnosis.problems:
            output.line(console)
        output.heading(console, "What was found")
        environment, probe, training = self.diagnosis.environment, self.diagnosis.probe, self.diagnosis.training
        libraries = _libraries_in_full if verbose else _libraries
        requirements = _requirements_in_full if verbose else _requirements
        rows: dict[str, Iterable[str]] = {
            "system": [_system(environment, verbose)],
            "ONNX Runtime": _onnxruntime(environment, probe),
            "packages": _packages(environment, verbose),
            "driver": _driver(environment, verbose),
            "GPUs": _gpus(environment, probe, verbose),
            "libraries": list(libraries(environment)) or ["unknown (no provider file says which)"],
            **(_training(training) if isinstance(training, TrainingFacts) else {}),
            "variables": _variables(environment, verbose),
            "requirements": requirements(self.requirements),
            "probe": _probe(probe, verbose),
        }
        record = probe.step("record") if probe is not None else None
        if record is not None:
            rows["settings"] = [record.detail]
        output.facts(console, {name: text for name, lines in rows.items() if (text := "\n".join(lines))})
        self._show_verdict(console)

    def _show_problems(self, console: Console, verbose: bool) -> None:
        problems = self.diagnosis.problems
        causes = self.causes
        consequences = [problem for problem in problems if problem.consequence_of is not None]
        warnings = [problem for problem in problems if problem.severity != "fatal" and problem.consequence_of is None]
        for number, cause in enumerate(causes):
            if number:
                output.line(console)
            output.show_error(console, cause, most_facts=None if verbose else _FACTS_SHOWN, with_others=False)
        if consequences:
            output.line(console)
            output.heading(console, "Consequences of it:" if len(causes) == 1 else "Consequences of these:")
        for problem in consequences:
            because = f" (because of {problem.consequence_of})" if len(causes) > 1 else ""
            output.line(console, f"  - {problem.code}: {problem.summary}{because}")
        if causes and warnings:
            output.line(console)
        show_more = output.show_reasons if verbose else output.show_fixes
        for problem in warnings:
            output.line(console, f"warning: {problem.summary} ({problem.code})", style="yellow")
            show_more(console, problem)

    def _show_verdict(self, console: Console) -> None:
        if self.causes:
            codes = ", ".join(dict.fromkeys(cause.code for cause in self.causes))
            output.line(console, f"not OK: {codes}; see above for the fixes", style="bold red")
            return
        if self.failure is not None:
            text = f"No check found a fault, but the probe failed: {self.failure}"
            output.line(console, text, style="bold red")
            return
        text = f"OK: {self.model or 'a session'} opens on the GPU"
        if self.diagnosis.probe is None:
            text = "OK: no fault found. Nothing was opened to make sure (--no-probe)."
        elif self.diagnosis.training is not None:
            text = _CAN_TRAIN
        output.line(console, text, style="bold green")


def _system(environment: Environment, verbose: bool) -> str:
    host = environment.host
    parts = [
        f"{host.os_name or host.system} {host.machine}",
        *([host.libc] if host.libc and verbose else []),
        f"{'Python' if host.implementation == 'CPython' else host.implementation} {dotted(host.python)}",
        *([f"in {host.container}"] if host.container else []),
        *(["WSL"] if host.wsl else []),
    ]
    return ", ".join(parts)


def _onnxruntime(environment: Environment, probe: ProbeResult | None) -> Iterator[str]:
    installed = environment.packages.onnxruntime
    if installed.folder is None:
        yield "not installed"
    elif not installed.importable:
        yield f"nothing to import in {installed.folder}"
    else:
        name = " ".join(filter(None, (installed.build_name, installed.build_version))) or "of unknown build"
        cuda = f"for CUDA {environment.cuda_major}" if environment.cuda_major else "without a known CUDA provider"
        providers = _providers(probe)
        # A provider file may be a remnant of another package.
        without = CUDA not in providers if providers else installed.build_name == "onnxruntime"
        cuda = "built without CUDA" if without and not installed.cuda_is_plugin else cuda
        yield f"{name}, {cuda}, in {installed.folder}"
        if installed.cuda_is_plugin:
            yield f"CUDA comes from a {installed.arrival}, in {installed.provider_library}"
    if len(installed.owners) > 1 or installed.folder is None:
        for owner in installed.owners:
            yield f"on record: {_name_and_version(owner)}"
    for stand_in in environment.packages.held:
        yield f"held: libraries that require onnxruntime find {stand_in.version}, and install no other (ortgpu hold)"
    for other in installed.elsewhere:
        yield f"another one, not used: {_name_and_version(other)} in {other.location}"


def _providers(probe: ProbeResult | None) -> list[str]:
    """Return the providers of the imported ONNX Runtime; none if it was not imported."""
    step = probe.step("import") if probe is not None else None
    return list(step.data.get("providers", ())) if step is not None else []


def _name_and_version(package: Distribution) -> str:
    return f"{package.name} {package.version or ''}".rstrip()


def _packages(environment: Environment, verbose: bool) -> Iterator[str]:
    packages = environment.packages
    torch = [f"torch {packages.torch.version or 'of unknown version'}"] if packages.torch else []
    others = [
        _name_and_version(package) for package in packages.others if verbose or package.name not in _HARDLY_TELLING
    ]
    if verbose:
        yield from (*others, *torch, *map(_name_and_version, packages.nvidia))
    else:
        yield ", ".join((*others, *torch, f"{len(packages.nvidia)} NVIDIA wheels"))


def _driver(environment: Environment, verbose: bool) -> Iterator[str]:
    driver = environment.driver
    version, cuda = driver.version, driver.supported_cuda
    parts = [version or "version unknown"] if version or driver.libcuda else []
    parts += [f"for CUDA up to {dotted(cuda)}"] if cuda else []
    parts += [driver.libcuda or f"{LIBCUDA} cannot be loaded"]
    yield ", ".join(parts)
    if verbose and driver.libcuda_error:
        yield driver.libcuda_error
    if not driver.nvml.available and (verbose or driver.libcuda is not None):
        yield f"NVML does not work: {driver.nvml.error}"
    if verbose and not environment.host.is_windows:
        yield f"kernel module: {driver.kernel_version or 'none seen'}"
        yield f"device files: {', '.join(driver.device_nodes) or 'none'}"


def _gpus(environment: Environment, probe: ProbeResult | None, verbose: bool) -> Iterator[str]:
    gpus: Sequence[GPU | CudaDevice] | None = (
        environment.driver.nvml.gpus if environment.driver.nvml.available else None
    )
    if gpus is None and probe is not None and probe.cuda is not None:
        gpus = probe.cuda.devices  # In some containers CUDA works and NVML does not.
    if gpus is None:
        yield "unknown (NVML unavailable)"
    elif not gpus:
        yield "none"
    elif verbose:
        yield from map(_full_name, gpus)
    elif len(gpus) == 1:
        yield f"{_kind(gpus[0])}, {gpus[0].uuid or 'UUID unknown'}"
    else:
        yield from (f"{count} x {kind}" for kind, count in Counter(map(_kind, gpus)).items())


def _kind(gpu: GPU | CudaDevice) -> str:
    size = gpu.memory_total if isinstance(gpu, GPU) else gpu.total_memory
    parts = [
        gpu.name or "unnamed GPU",
        f"compute capability {dotted(gpu.compute_capability)}" if gpu.compute_capability else "generation unknown",
        f"{size / (1 << 30):.0f} GiB" if size is not None else "memory unknown",
    ]
    return ", ".join([*parts, *(["MIG"] if isinstance(gpu, GPU) and gpu.mig_enabled else [])])


def _full_name(gpu: GPU | CudaDevice) -> str:
    if not isinstance(gpu, GPU):
        return f"{gpu.ordinal}: {_kind(gpu)}, {gpu.uuid or 'UUID unknown'}"
    free = f"{gpu.memory_free / (1 << 30):.1f} GiB free" if gpu.memory_free is not None else "free memory unknown"
    mode = f"compute mode {gpu.compute_mode or 'unknown'}"
    facts = [f"{gpu.index}: {_kind(gpu)}", free, mode, gpu.uuid or "UUID unknown"]
    return ", ".join([*facts, *([gpu.pci_bus_id] if gpu.pci_bus_id else []), *gpu.mig_uuids])


def _libraries(environment: Environment) -> Iterator[str]:
    """Yield the libraries by origin. The parts of cuDNN are not listed."""
    by_origin: dict[str, list[str]] = {}
    absent: dict[str, list[str]] = {}
    for library in environment.libraries:
        if library.chosen is not None and library.spec.part_of is None:
            by_origin.setdefault(f"{library.chosen.source} ({library.chosen.root})", []).append(short_name(library))
        elif library.chosen is None and library.spec.part_of is None:
            absent.setdefault(_absence(library), []).append(short_name(library))
    for words, names in (*by_origin.items(), *absent.items()):
        yield f"{', '.join(names)}: {words}"


def _libraries_in_full(environment: Environment) -> Iterator[str]:
    for library in environment.libraries:
        if library.chosen is not None:
            yield f"{library.soname}: {library.chosen.source}, {library.chosen.path}"
        elif library.spec.part_of is None:
            yield f"{library.soname}: {_absence(library)}"
        else:
            continue
        for other in library.candidates[1:]:
            yield f"    not needed: {other.path} ({other.source})"
        for other in library.rejected:
            yield f"    unusable: {other.path} ({other.source}): {other.problem}"


def _absence(library: Resolution) -> str:
    needed = "" if library.required else " (loaded only on demand)"
    return f"NOT FOUND{needed}" + (f", {counted(len(library.rejected), 'unusable file')}" if library.rejected else "")


def _variables(environment: Environment, verbose: bool) -> Iterator[str]:
    variables = environment.variables
    for name, value in variables.now.items():
        if verbose or name not in _HARDLY_TELLING:
            yield f"{name}={value if verbose or len(value) <= _LONG else value[: _LONG - 3] + '...'}"
    before = variables.at_start
    if before is not None and before.get("LD_LIBRARY_PATH") != variables.now.get("LD_LIBRARY_PATH"):
        yield f"LD_LIBRARY_PATH was {before.get('LD_LIBRARY_PATH', 'not set')!r} at the start, which is what counts"


def _requirements(requirements: Sequence[Requirement]) -> Iterator[str]:
    passed, failed, unknown = (
        [requirement.name for requirement in requirements if requirement.status_minimum == status]
        for status in ("pass", "fail", "unknown")
    )
    parts = [f"{len(passed)} met"]
    parts += [f"not met: {', '.join(failed)}"] if failed else []
    parts += [f"unknown: {', '.join(unknown)}"] if unknown else []
    yield "; ".join(parts)


def _requirements_in_full(requirements: Iterable[Requirement]) -> Iterator[str]:
    for row in requirements:
        yield f"{row.name}: {row.found or 'unknown'}"
        yield f"    minimum {row.minimum}: {row.status_minimum}"
        status = {"fail": "not met, but works"}.get(row.status_recommended, row.status_recommended)
        yield f"    recommended {row.recommended}: {row.status_minimum if row.status_minimum == 'fail' else status}"
        if row.note:
            yield f"    {row.note}"


def _probe(probe: ProbeResult | None, verbose: bool) -> Iterator[str]:
    if probe is None:
        yield "not run (--no-probe)"
        return
    if verbose:
        for step in probe.steps:
            yield f"{step.name}: {'ok' if step.ok else 'FAILED'}, {step.detail}"
    else:
        done = [f"{step.name} {'ok' if step.ok else 'FAILED'}" for step in probe.steps]
        yield f"{', '.join(done) or 'no step was finished'}; {probe.seconds:.1f} s"
        imported = probe.step("import")
        if imported is not None and not imported.ok:
            offers = _providers(probe)
            why = f"its providers are {', '.join(offers)}" if offers else imported.detail.partition("\n")[0]
            yield f"import: {why}"
    if probe.died_in == "start" and probe.returncode is None and not probe.timed_out:
        yield f"could not be started: {probe.output}"
    elif probe.died_in is not None:
        how = (
            "ran out of time" if probe.timed_out else f"ended with {probe.signal or f'exit status {probe.returncode}'}"
        )
        yield f"{how} in: {probe.died_in}"
    if verbose:
        yield from (f"    | {text}" for text in probe.output.splitlines() if text.strip())


def _training(training: TrainingFacts) -> dict[str, list[str]]:
    environment = training.environment
    ssh = [
        f"{connection.host}: {'reached' if connection.returncode == 0 else 'not reached'}"
        for connection in training.ssh
    ]
    return {
        "NCCL": list(map(str, environment.nccl.libraries)) or ["no libnccl.so.2 was found"],
        "MPI": _mpi(environment.mpi),
        "network": _network(environment.network),
        **({"ssh": ssh} if ssh else {}),
        **({"shared folder": [_meeting(training.shared_folder)]} if training.shared_folder is not None else {}),
    }


def _mpi(mpi: Mpi) -> list[str]:
    launcher = f"{mpi.launcher or 'launcher of unknown version'}, {mpi.mpirun}" if mpi.mpirun else "no mpirun"
    library = f"mpi4py {mpi.mpi4py or ''}".rstrip() + f" with {mpi.library or 'no library'}"
    return [launcher, library if mpi.mpi4py or mpi.library or mpi.error else "no mpi4py"]


def _network(network: Network) -> list[str]:
    if network.interfaces is None:
        return ["unknown"]
    cards = ", ".join(map(str, network.cards)) or "no card that is up"
    ports = ", ".join(f"{port.device} port {port.port}" for port in network.infiniband or ())
    return [f"{cards}; InfiniBand: {ports or 'none'}"]


def _meeting(meeting: FolderMeeting) -> str:
    if not meeting.ok:
        return f"{meeting.folder}: rank {meeting.rank} did not meet all of {meeting.world_size}"
    if meeting.world_size == 1:
        return (
            f"{meeting.folder}: written and read by this process alone; start the doctor with mpirun to compare ranks"
        )
    return f"{meeting.folder}: rank {meeting.rank} met all {meeting.world_size}"
