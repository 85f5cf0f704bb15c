"""The CUDA context that each session was opened in, and whether the process still has it.

Another library may reset the GPU (numba's ``Device.reset()``, ``cudaDeviceReset``, ``cuDevicePrimaryCtxReset``). Then
all memory and streams of the process there are gone. CUDA reports that at some later call, by varying codes, and code
that writes into pinned memory or destroys a session crashes.
"""

from __future__ import annotations

from ..environment.gpu.cuda import RESULT_NAMES, context_id
from ..errors import ProviderFailureError, manual

IS_DESTROYED = 709  # CUDA_ERROR_CONTEXT_IS_DESTROYED

_opened_in: dict[int, tuple[int, int]] = {}  # by id() of the session: ordinal, and the context at that time


def remember(key: int, ordinal: int) -> None:
    """Note the context of a session that has just been opened; ``key`` is its ``id()``."""
    context = context_id(ordinal)
    if context:
        _opened_in[key] = (ordinal, context)


def forget(key: int, opened_in: dict[int, tuple[int, int]] = _opened_in) -> None:
    """Drop the note of a session. Works at the end of the process, too, when this module's names are None."""
    opened_in.pop(key, None)


def is_gone(key: int) -> bool:
    """Return True if the context that a session was opened in was destroyed, False if not or unknown."""
    if key not in _opened_in:
        return False
    ordinal, context = _opened_in[key]
    return context_id(ordinal) not in (context, None)


def destroyed(evidence: list[str]) -> ProviderFailureError:
    """Return the error for a session whose memory on the GPU is gone, while the GPU and the process are well."""
    return ProviderFailureError(
        "something in this process reset the GPU, and what this session had there is gone",
        evidence=evidence,
        fixes=[
            manual("open the session again"),
            manual(
                "and reset no device while sessions are open: numba's Device.reset() and cuda.close(), "
                "cudaDeviceReset(), cuDevicePrimaryCtxReset(); close() gives a session's memory back"
            ),
        ],
        library="CUDA",
        status=RESULT_NAMES[IS_DESTROYED],
    )
