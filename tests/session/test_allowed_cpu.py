"""A session that may be on the CPU, because its argument says so, stays allowed to be there."""

from __future__ import annotations

import sys

from tests.lab.models import Models
from tests.support.children import ROOT, child_environment, run_child

PROGRAM = ROOT / "tests" / "programs" / "allowed_cpu.py"


def test_what_the_constructor_was_allowed_stays_allowed(models: Models) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    found = run_child([sys.executable, str(PROGRAM), str(models.relu)], env=env).ok().json
    here = "cpu ['CPUExecutionProvider']"
    assert found == {
        "to cpu": f"{here} 0",
        "to cpu with options": f"{here} 0",
        "to cuda": f"{here} 1",
        "to cuda again": f"{here} 1",
        "to openvino": "ProviderRequestError",
        "pickled": "cpu",
        "copied": "cpu",
        "constructed again": "cpu",
        "explained": str({"Relu 'the_relu'": "the whole session is on the CPU"}),
    }
