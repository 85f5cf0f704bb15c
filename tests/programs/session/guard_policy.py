"""Programs of ``tests/session/test_guard_policy.py``."""

from __future__ import annotations

import os
import warnings

import onnxruntime
from onnxruntime import InferenceSession, OrtExecutionProviderDevicePolicy, SessionOptions

import ortgpu
from ortgpu import GPUSession
from tests.programs.on_cpu import NEG, feeds, outcome, report


def carrying(devices=None):
    options = SessionOptions()
    if devices is None:
        options.set_provider_selection_policy(OrtExecutionProviderDevicePolicy.PREFER_GPU)
    else:
        options.add_provider_for_devices(devices, {})
    return options


cpu = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "CPUExecutionProvider"]
os.environ.pop("ORTGPU_ALLOW_CPU")


def a_policy_that_finds_no_gpu_is_refused() -> None:
    plain = InferenceSession(NEG, carrying()).get_providers()
    with ortgpu.enforce():
        refused = [outcome(lambda: InferenceSession(NEG, carrying(devices))) for devices in (None, cpu)]
        meant = InferenceSession(NEG, carrying(), ["CPUExecutionProvider"]).get_providers()
        os.environ["ORTGPU_ALLOW_CPU"] = "1"
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            allowed = InferenceSession(NEG, carrying())
        report(
            [
                plain,
                refused,
                meant,
                [each.category.__name__ for each in warned],
                [each.filename for each in warned],
                [record.kind for record in ortgpu.sessions()],
            ]
        )


def what_else_the_options_carry_passes_without_a_fallback() -> None:
    class Other(InferenceSession):
        def _create_inference_session(self, *arguments):
            super()._create_inference_session(*arguments)
            self._providers = ["PluginExecutionProvider", *self._providers]

    with ortgpu.enforce():
        session = Other(NEG, carrying(cpu))
        report(
            [
                type(session) is Other,
                session._enable_fallback,
                [record.kind for record in ortgpu.sessions()],
                session.run(None, feeds(2)[1])[0].tolist(),
            ]
        )


def carried_options_do_not_hide_what_is_wrong_with_the_machine() -> None:
    named = [
        outcome(lambda: GPUSession(NEG, carrying(cpu), ["CPUExecutionProvider"], allow_cpu=allowed))
        for allowed in (False, True)
    ]
    report([outcome(lambda: GPUSession(NEG, carrying(cpu), allow_cpu=False)), *named])
