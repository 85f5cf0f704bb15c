"""Judge facts: run the checks, put their findings in order, and explain a failure."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import errors
from ..environment.inspection import Environment, UnreadEnvironment, inspect_environment, plain_data
from ..environment.libraries.catalogue import spec_for
from ..environment.libraries.library_file import read_library
from ..environment.packages.installed import count_engines
from ..environment.packages.plugins import PREFIX, list_other_cuda_plugins
from ..errors import GPUError, manual
from ..model.contents import collective_operators, describe_model
from ..model.outline import GraphOutline
from ..provider.cudnn import operators_needing_cudnn
from ..provider.living import sessions
from ..provider.placement import cufft_operators
from ..provider.requests import CUDA
from .checks import attempts, classifier, devices, driver, imports, libraries, packages, surroundings
from .checks import model as model_checks
from .facts import Facts, Observed, Request
from .messages.runtime_words import OF_WHEELS
from .probe.result import ProbeResult

if TYPE_CHECKING:
    from ..environment.gpu.cuda import CudaState
    from ..provider.preloading import PreloadReport
    from ..provider.runtime import Runtime

Check = Callable[[Facts], GPUError | None]

_DRIVER_AND_GPUS: tuple[Check, ...] = (
    devices.named_device,
    devices.unsupported,
    devices.cudnn_without_code,
    driver.not_found,
    driver.descriptors_exhausted,
    driver.linux_driver_in_wsl,
    driver.too_old,
    driver.device_files_closed,
    driver.not_ready,
    devices.none_visible,
)

# The order of the checks is the order of likely root causes.
CHECKS_OF_AN_OPENING: tuple[Check, ...] = (
    packages.platform_unsupported,
    packages.package_unreadable,
    packages.guard_unreadable,
    packages.not_installed,
    packages.shadowed,
    packages.broken_files,
    packages.conflicting,
    packages.held_at_another_version,
    packages.plugin_incomplete,
    packages.cpu_only,
    packages.plugins_unknown,
    packages.plugin_of_another_release,
    packages.replaced_after_import,
    packages.provider_missing,
    packages.library_damaged,
    packages.numpy_damaged,
    imports.visual_c_missing,
    imports.other_engine,
    imports.failed,
    model_checks.collective_ops_missing,  # No library, driver or device helps.
    libraries.missing,
    imports.provider_unloadable,
    libraries.cudnn_missing,
    libraries.cufft_missing,
    libraries.cudnn_of_other_cuda,
    libraries.cudnn_mixed,
    libraries.not_as_installed,
    *_DRIVER_AND_GPUS,
    packages.plugin_without_device,
    packages.plugin_unregistered,
    attempts.unusable,
    devices.busy,
)
# A session that explains its failure has no probe, and its opening reads the file of the model.
CHECKS: tuple[Check, ...] = (
    *CHECKS_OF_AN_OPENING,
    attempts.died,
    attempts.session_failed,
    lambda facts: model_checks.unreadable(facts.request.model),
    lambda facts: model_checks.data_missing(facts.request.model),
    lambda facts: model_checks.custom_domains(facts.request.model),
    attempts.model_failed,
    model_checks.report_cpu_nodes,
)

# These explain the failure of a process that has imported ONNX Runtime and loaded every library. The check
# cudnn_without_code is not among them: it needs the facts of all packages, and an open session asks the loaded cuDNN.
_LOADED: tuple[Check, ...] = (model_checks.collective_ops_missing, libraries.cudnn_of_other_cuda)
CHECKS_OF_THE_DRIVER: tuple[Check, ...] = (
    *_LOADED,
    *(check for check in _DRIVER_AND_GPUS if check is not devices.cudnn_without_code),
    attempts.unusable,
    devices.busy,
)
# Without libcuda and NVML nothing else of the driver and its GPUs can be judged.
CHECKS_WITHOUT_A_DRIVER = (*_LOADED, driver.not_found, devices.none_visible)


def find_problems(facts: Facts, checks: Iterable[Check] = CHECKS) -> tuple[GPUError, ...]:
    """Return all problems that ``checks`` find. The function is pure and deterministic.

    Fatal root causes come first, in the order of the checks; then their consequences, with ``consequence_of`` set; then
    warnings. A missing package is no root cause without an NVIDIA GPU, or if another release brings its own libraries.
    """
    problems: list[GPUError] = []
    reported: set[tuple[str, str]] = set()
    for check in checks:
        error = check(facts)
        if error is not None and (error.code, error.summary) not in reported:
            reported.add((error.code, error.summary))
            problems.append(error)
    if len(problems) > 1:
        _set_consequences(problems, facts)
    return tuple(sorted(problems, key=lambda error: (error.severity != "fatal", error.consequence_of is not None)))


def _set_consequences(problems: list[GPUError], facts: Facts) -> None:
    roots: list[GPUError] = []
    for error in problems:
        if error.severity != "fatal":
            continue
        cause = next((root for root in roots if _explains(root, error, facts)), None)
        if cause is None:
            roots.append(error)
        else:
            error.consequence_of = cause.code
    for root in roots:
        codes = {error.code for error in problems if _is_moot(error, root)}
        for error in problems:
            if error.consequence_of in codes or _is_moot(error, root):
                error.consequence_of = root.code


def _is_moot(error: GPUError, root: GPUError) -> bool:
    other_hardware = isinstance(root, errors.DriverNotFoundError) and all(fix.needs == "hardware" for fix in root.fixes)
    if isinstance(error, errors.CPUOnlyPackageError):
        return other_hardware
    if not isinstance(error, (errors.LibraryNotFoundError, errors.LibraryVersionError)):
        return False
    sonames = error.missing if isinstance(error, errors.LibraryNotFoundError) else error.needed
    other_release = isinstance(root, (errors.DriverTooOldError, errors.UnsupportedDeviceError)) and any(
        "onnxruntime-gpu" in fix and "nvidia-" in fix for fix in root.fixes
    )
    return bool(sonames) and all(map(spec_for, sonames)) and (other_hardware or other_release)


def _explains(root: GPUError, error: GPUError, facts: Facts) -> bool:
    if isinstance(root, errors.UnsupportedPlatformError) and (root.system, root.machine) in packages.CUDA_PLATFORMS:
        return False  # The C library is too old, and that explains nothing else.
    if isinstance(error, errors.NoDeviceError) and surroundings.are_hidden(facts.environment):
        return False  # A variable hides the GPU from any driver.
    if isinstance(root, errors.BrokenPackageError) and isinstance(error, errors.BrokenPackageError):
        return None in (root.package, error.package) or root.package == error.package
    if isinstance(root, errors.BrokenPackageError) and isinstance(error, errors.CPUOnlyPackageError):
        return (root.package or "").startswith(PREFIX)  # The files of a plugin are missing.
    return error.code in root.explains


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The problems, most likely cause first, and the facts behind them. ``str()`` shows the problems."""

    problems: tuple[GPUError, ...]
    # A notebook shows repr(): these fields are pages long.
    environment: Environment = field(repr=False)
    probe: ProbeResult | None = field(default=None, repr=False)  # It is None without a probe.
    training: object | None = field(default=None, repr=False)  # It holds TrainingFacts; None: another profile.

    @property
    def ok(self) -> bool:
        """True if no problem is fatal: sessions open. For training: the driver, the API and MPI work."""
        return not any(problem.severity == "fatal" for problem in self.problems)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.problems)) or "no problem was found"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: "ok", "problems", "environment", "probe", and "training" if it was judged."""
        return {
            "ok": self.ok,
            "problems": [problem.as_dict() for problem in self.problems],
            "environment": self.environment.as_dict(),
            "probe": self.probe.as_dict() if self.probe is not None else None,
            **({"training": plain_data(self.training)} if self.training is not None else {}),
        }


def diagnose_inference(
    model: str | bytes | os.PathLike[str] | None = None, *, probe: bool, timeout: float
) -> Diagnosis:
    """Judge whether a session opens here: :func:`ortgpu.diagnose` with its default profile."""
    check_timeout(timeout)
    result, observed = None, Observed()
    if probe:
        from .probe.probing import run_probe  # A session that explains its failure does not need it.

        result = run_probe(model, timeout=timeout)
        observed = observed_by(result)
    # Leave out the questions that killed the child. An altered file may have killed it, too.
    deadly, crashed = (result.deadly, result.crashed) if result is not None else ((), False)
    environment = inspect_environment(unasked=deadly, compare_contents=crashed)
    request = request_for(GraphOutline(model)) if model is not None else Request()
    if request.collective_operators:
        from ..provider.runtime import load_runtime

        observed = dataclasses.replace(observed, has_collective_ops=load_runtime().has_collective_ops)
    return Diagnosis(find_problems(Facts(environment, request, observed)), environment, result)


def check_timeout(timeout: float) -> None:
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")


def request_for(outline: GraphOutline) -> Request:
    model = describe_model(outline)
    return Request(
        cudnn_operators=operators_needing_cudnn(outline, model.operators),
        cufft_operators=cufft_operators(model.operators),
        collective_operators=collective_operators(model.operators),
        model=model,
    )


def observed_by(result: ProbeResult) -> Observed:
    imported, provider = result.step("import"), result.step("provider")
    providers = result.measured("import", "providers")
    problem = result.measured("provider", "plugin_problem")
    return Observed(
        import_error=imported.detail if imported is not None and providers is None else None,
        available_providers=tuple(providers) if providers is not None else None,
        provider_error=provider.detail if provider is not None and not (provider.ok or problem) else None,
        plugin_problem=problem,
        cuda=result.cuda,
        probe=result,
        list_sessions=sessions,
    )


# The functions below explain why this process could not open a session.

_FIXES_FOR_UNKNOWN_CAUSE = (
    manual("run `ortgpu doctor`: it opens the driver, the provider and a small session in a process of its own"),
    manual("if a session opens there, restart this process and open its first GPUSession before CUDA is used"),
    manual("otherwise please report it to the maintainers, with the output of `ortgpu doctor --json --redact`"),
)


def why_unusable(
    runtime: Runtime,
    *,
    request: Request | None = None,
    cuda: CudaState | None = None,
    cause: BaseException | None = None,
) -> GPUError | None:
    """Return the most likely error, with the other problems attached.

    None: neither the environment nor the words of ``cause`` say anything about the GPU. Without a ``cause`` there is
    always an error, at worst a :class:`ProviderFallbackError`. ``cuda``: the driver's answer to this process, if asked.
    """
    request = request or Request()
    observed = _observed(runtime, request, cuda)
    report = _report_if_whole(runtime, observed)
    environment = UnreadEnvironment() if report is None else UnreadEnvironment(provider=report.provider)
    facts = Facts(environment, request, observed)
    error = classifier.explain_opening(str(cause), facts) if cause is not None else None
    if error is None and cause is not None:
        return None
    problems: tuple[GPUError, ...] = ()
    if report is not None and (cause is None or isinstance(error, (errors.DriverError, errors.DeviceError))):
        has_driver = environment.driver.libcuda is not None or environment.driver.nvml.available
        problems = find_problems(facts, CHECKS_OF_THE_DRIVER if has_driver else CHECKS_WITHOUT_A_DRIVER)
    if not problems or problems[0].severity != "fatal":
        problems = find_problems(facts, CHECKS_OF_AN_OPENING)
    fatal = [problem for problem in problems if problem.severity == "fatal"]
    # Altered files are only a warning, and still a better guess than no cause.
    fatal = fatal or [problem for problem in problems if isinstance(problem, errors.BrokenPackageError)]
    if error is None or isinstance(error, errors.ProviderFallbackError):  # The words name no cause.
        unbound = "ONNX Runtime did not bind its CUDA provider"
        explaining = fatal or list(filter(None, [driver.too_few_descriptors(None, facts, [unbound])]))
    elif isinstance(error, errors.ProviderFailureError) and error.library in OF_WHEELS:
        # A known problem of the libraries explains why one of them fails.
        explaining = fatal or [problem for problem in problems if isinstance(problem, errors.LibraryConflictError)]
    else:
        explaining = [problem for problem in fatal if error.code in problem.explains and problem.code != error.code]
    others = [problem for problem in problems if error is None or problem.code != error.code]
    if explaining:
        root = explaining[0]
        root.severity = "fatal"
        if error is not None and not isinstance(error, errors.ProviderFallbackError):
            error.consequence_of = root.code
            others.insert(0, error)
        return root.with_others(others)
    if error is None:
        evidence = [runtime.import_error] if runtime.import_error else []
        evidence.append(f"providers in this build: {', '.join(runtime.available_providers or ())}")
        nobody = "ONNX Runtime did not bind its CUDA provider, and no check knows why"
        error = errors.ProviderFallbackError(nobody, evidence=evidence)
    if isinstance(error, errors.ProviderFallbackError):
        error.fixes = _FIXES_FOR_UNKNOWN_CAUSE
    return error.with_others(problem for problem in others if problem.code != error.code)


def why_no_module(runtime: Runtime) -> GPUError:
    error = why_unusable(runtime)
    return error if error is not None else errors.OnnxRuntimeNotInstalledError("ONNX Runtime cannot be imported")


def _report_if_whole(runtime: Runtime, observed: Observed) -> PreloadReport | None:
    """Return the report of the libraries if all is loaded, so that only the driver or its GPUs are in question."""
    report, installed = observed.preload, runtime.packages.onnxruntime
    if report is None or not report.ok or report.missing or report.cudnn_mixed or runtime.cuda_is_plugin:
        return None
    refused = observed.import_error or observed.provider_error or observed.plugin_problem
    if refused or CUDA not in (observed.available_providers or ()) or installed.is_of_another_release:
        return None
    # Without a driver nobody has opened the bridge to the provider, and of two packages one has lost files.
    is_intact = installed.bridge is not None and read_library(installed.bridge).problem is None
    return report if is_intact and count_engines(installed.home) < 2 else None


def _observed(runtime: Runtime, request: Request, cuda: CudaState | None) -> Observed:
    available = runtime.available_providers
    return Observed(
        import_error=runtime.import_error,
        has_session=None if runtime.import_error else runtime.module is not None,
        available_providers=available,
        preload=runtime.preload,
        provider_error=runtime.provider_error,
        plugin_problem=runtime.plugin_problem,
        cuda_is_plugin=runtime.cuda_is_plugin,
        has_other_cuda_plugin=CUDA not in (available or ()) and bool(list_other_cuda_plugins()),
        cuda=cuda,
        has_collective_ops=runtime.has_collective_ops if request.collective_operators else None,
        list_sessions=sessions,
        numpy_error=runtime.numpy_error,
    )
