"""A program that tunes the model of its first argument on the CPU, and is ended by SIGTERM when a candidate ended."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ortgpu.session.tuning.children import Wanted
from ortgpu.session.tuning.tuning import tune_at
from tests.support.tuning_faults import CPU

if __name__ == "__main__":
    model = Path(sys.argv[1]).read_bytes()
    tune_at(
        CPU,
        Wanted(model, precision="float16"),
        Path(sys.argv[2]),
        on_trial=lambda _: os.kill(os.getpid(), signal.SIGTERM),
    )
