"""Methods by which a GPUSession describes itself: inputs, outputs, providers, and the reasons for its placement.

ONNX Runtime answers most of them from attributes of the Python object. A session that is closed or lost the GPU would
still claim the CUDA provider, so these methods check first that it was not closed or refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..provider import lifetime
from ..running.onnxruntimes import InferenceSession
from .throughput import ThroughputMethods

if TYPE_CHECKING:
    from .placement_details import PlacementDetails
    from .request import SessionRequest

# The methods of all releases since 1.18 that do not ask the C++ session.
_ANSWERS = (
    "get_inputs", "get_outputs", "get_overridable_initializers", "get_modelmeta", "get_session_options",
    "get_providers", "get_provider_options", "get_input_memory_infos", "get_output_memory_infos",
    "get_input_epdevices",
)  # fmt: skip


class SessionFacts(ThroughputMethods):
    """The methods that describe a session. Each raises ExecutionError if the session is closed or lost the GPU."""

    if TYPE_CHECKING:
        _request: SessionRequest

    def explain_placement(self) -> PlacementDetails:
        """Explain why each node is where it is, and where ONNX Runtime copies between devices.

        Opens the model again in a child process, with default session and provider options. While it runs, this takes
        the time and GPU memory of another session. The optimised model, and a model passed as bytes, are written to a
        temporary folder that no other user can read, which is removed afterwards.

        Raises:
            GPUError: the child could not open the model on this session's GPU.
            TimeoutError: it took more than five minutes.
        """
        from .placement_details import explain_placement

        lifetime.refuse_if_closed(self)
        return explain_placement(self._request.model, device=lifetime.device_of(self).ordinal)


def _refusing(method: Callable[[SessionFacts], Any]) -> Callable[[SessionFacts], Any]:
    @functools.wraps(method)
    def ask(self: SessionFacts) -> Any:
        lifetime.refuse_if_closed(self)
        return method(self)

    return ask


for _name in _ANSWERS:
    if hasattr(InferenceSession, _name):
        setattr(SessionFacts, _name, _refusing(getattr(InferenceSession, _name)))
