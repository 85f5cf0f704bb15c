"""Copy SessionOptions, and send the function that makes them to other processes.

ONNX Runtime's own object cannot be pickled. Its properties can be read back. Configuration entries can only be read by
name, so this module finds names in the installed files. Custom operator libraries, initialisers, overrides of free
dimensions and callbacks cannot be read back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environment.libraries.library_file import read_section
from ..errors import ProviderRequestError, manual
from ..process.background import fork_safe_lock, this_thread
from ..process.late import late
from .runtime import load_runtime

if TYPE_CHECKING:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as extension
else:
    onnxruntime = late("onnxruntime")
    extension = late("onnxruntime.capi.onnxruntime_pybind11_state")

_PROPERTIES = (
    "enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "enable_profiling", "execution_mode",
    "execution_order", "graph_optimization_level", "inter_op_num_threads", "intra_op_num_threads", "log_severity_level",
    "log_verbosity_level", "logid", "optimized_model_filepath", "profile_file_prefix", "use_deterministic_compute",
    "use_per_session_threads",
)  # fmt: skip

# The files of some releases since 1.18 lack these names of onnxruntime_session_options_config_keys.h as strings: a
# compiler may put short strings into code.
_ENTRIES = (
    "ep.context_embed_mode", "mlas.enable_gemm_fastmath_arm64_bfloat16", "optimization.enable_cast_chain_elimination",
    "optimization.memory_optimizer_config", "session.allow_released_opsets_only",
    "session.disable_qdq_constant_folding", "session.load_model_format",
    "session.model_external_initializers_file_folder_path", "session.record_ep_graph_assignment_info",
    "session.strict_shape_type_inference", "session.use_ort_model_bytes_directly", "session.x64quantprecision",
)  # fmt: skip
_ENTRY = re.compile(rb"\0((?:session|ep|optimization|mlas)\.[a-z0-9_.]{3,100})(?=\0)")

CPU_FALLBACK_KEY = "session.disable_cpu_ep_fallback"
RECORDING_KEY = "session.record_ep_graph_assignment_info"  # new in ONNX Runtime 1.24

_lock = fork_safe_lock()


class Carried:
    """A carrier of SessionOptions. A copy shares them; a pickle has the function that makes them.

    Args:
        options: the options; None for ONNX Runtime's defaults.
        make: returns new, equal options. It pickles if it is a function of a module.
    """

    def __init__(self, options: Any, make: Callable[[], Any] | None = None) -> None:
        self.options, self.make = options, make

    def __deepcopy__(self, memo: object) -> Carried:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.options is not None and self.make is None:
            raise not_sent()
        return _arrived, (self.make,)

    def copied(self) -> Any:
        """Return new, equal SessionOptions. Without ``make`` they have only the readable settings."""
        if self.make is not None:
            return self.make()
        options = onnxruntime.SessionOptions()
        for name in _PROPERTIES:
            if hasattr(options, name):
                setattr(options, name, getattr(self.options, name))
        for key in _entry_names():
            if (value := config_entry(self.options, key)) is not None:
                options.add_session_config_entry(key, value)
        return options


def _arrived(make: Callable[[], Any] | None) -> Carried:
    return Carried(make, make)


def not_sent() -> ProviderRequestError:
    return ProviderRequestError(
        "SessionOptions cannot go to another process",
        evidence=["ONNX Runtime does not tell which initialisers, overrides and libraries were added to them"],
        fixes=[manual("pass a function of a module that makes them: sess_options=make_options")],
        requested="sess_options",
    )


@functools.cache
def _entry_names() -> tuple[str, ...]:
    """Return the names of configuration entries that the installed ONNX Runtime or its CUDA provider reads."""
    names = set(_ENTRIES)
    for path in filter(None, (extension.__file__, load_runtime().provider_library)):
        content = read_section(path, ".rodata")
        if content is None:  # The file has another format.
            content = Path(path).read_bytes()
        names.update(name.decode() for name in _ENTRY.findall(content))
    return tuple(sorted(names))


def recording_options() -> Any:
    """Return new SessionOptions with the entry that makes ONNX Runtime record where it places nodes."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(RECORDING_KEY, "1")
    return options


def recording(options: Any) -> Any:
    """Return ``options``, or new ones for None, with the recording entry. The caller's own entry stays.

    Our entry remains in the caller's options: ONNX Runtime logs a warning for an entry that is written again, and
    entries cannot be removed. Other sessions with these options record their nodes, too, at half a microsecond each.
    """
    if options is None:  # A query for a missing entry takes 50 µs.
        return recording_options()
    with this_thread.holds, _lock:
        if config_entry(options, RECORDING_KEY) is None:
            options.add_session_config_entry(RECORDING_KEY, "1")
    return options


def may_record(options: Any) -> bool:
    """Return False if the caller switched off that ONNX Runtime records where it places nodes."""
    return options is None or config_entry(options, RECORDING_KEY) in (None, "1")


def keeps_cpu_out(options: Any) -> bool:
    """Return True if an entry makes ONNX Runtime refuse a list that names the CPU provider (issue 16016)."""
    return options is not None and config_entry(options, CPU_FALLBACK_KEY) == "1"


def carries_providers(options: Any) -> bool:
    """Return True if execution providers were chosen in the options (since 1.22). Their names cannot be read."""
    has_providers = getattr(options, "has_providers", None)
    return has_providers is not None and bool(has_providers())


def config_entry(options: Any, key: str) -> str | None:
    try:
        value: str = options.get_session_config_entry(key)
    except Exception:  # noqa: BLE001 - a missing entry raises, and the class differs between releases
        return None
    return value
