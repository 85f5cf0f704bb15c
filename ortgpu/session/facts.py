"""What a GPUSession says of itself: its inputs, its providers, why its nodes are where they are.

ONNX Runtime answers most of it from attributes of the Python object, whatever became of the session behind it: of one
that lost the GPU it would go on to say that it has the CUDA provider.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..provider import lifetime
from ..running.onnxruntimes import InferenceSession
from ..running.throughput import ThroughputMethods

if TYPE_CHECKING:
    from .placement_details import PlacementDetails

# Of any release since 1.18. What else ONNX Runtime answers, it asks the C++ session for.
_ANSWERS = (
    "get_inputs", "get_outputs", "get_overridable_initializers", "get_modelmeta", "get_session_options",
    "get_providers", "get_provider_options", "get_input_memory_infos", "get_output_memory_infos",
    "get_input_epdevices",
)  # fmt: skip


class SessionFacts(ThroughputMethods):
    """Each method raises what every use raises, where the session is closed or lost the GPU."""

    def explain_placement(self) -> PlacementDetails:
        """Why each node is where it is, and where ONNX Runtime copies between devices.

        Opens the model once more, in a child process, with the defaults of session and provider options: costs the
        time and the GPU memory of a session while it lasts. The optimised model, and a model that was given as bytes,
        are written to a temporary folder that no other user can read, and removed with it.

        Raises:
            GPUError: the child could not open the model on this session's GPU.
            TimeoutError: it took more than five minutes.
        """
        from .placement_details import explain_placement

        lifetime.refuse_if_unusable(self)
        of: Any = self  # a GPUSession, which has these two
        return explain_placement(of._request.model, device=lifetime.device_of(self).ordinal)


def _refusing(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(InferenceSession, name))
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        lifetime.refuse_if_unusable(self)
        return getattr(InferenceSession, name)(self, *args, **kwargs)  # looked up now, for tracers put theirs in place

    return ask


for _name in _ANSWERS:
    if hasattr(InferenceSession, _name):
        setattr(SessionFacts, _name, _refusing(_name))
