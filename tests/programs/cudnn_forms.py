"""Open sessions of a few forms on a machine without cuDNN, as they are and with the option enable_cudnn=0."""

from __future__ import annotations

import sys
from typing import Any

from ortgpu import GPUError, GPUSession
from tests.support.children import report
from tests.support.cudnn_forms import FORMS

NAMES = sys.argv[1:]
OFF: list[Any] = [("CUDAExecutionProvider", {"enable_cudnn": "0"})]


def outcome(model: bytes, providers: list[Any] | None) -> list[Any]:
    try:
        with GPUSession(model, providers=providers) as session:
            return [session.device.kind]
    except GPUError as error:
        return [type(error).__name__, list(getattr(error, "missing", ())), error.summary]


report(
    "outcomes",
    {
        form.name: [outcome(form.model()[0], providers) for providers in (None, OFF)]
        for form in FORMS
        if form.name in NAMES
    },
)
