"""Programs of ``tests/session/test_records.py``."""

from __future__ import annotations

import sys

from tests.programs.machines import report
from tests.programs.session.watched import MODEL, ask, refusals


def a_session_applies_its_record_and_says_so() -> None:
    import logging
    import os

    os.environ["XDG_CACHE_HOME"] = sys.argv[2]
    RECORD = os.path.join(sys.argv[2], "named.json")

    def options(**arguments):
        return ask(**arguments)[0][0]

    found = {"untuned": options()}
    from ortgpu.environment.gpu.cuda import initialise
    from ortgpu.model.outline import GraphOutline
    from ortgpu.provider.records import Choice, Record, default_path, key_of

    gpu = initialise().devices[0]
    record = Record(
        key_of(GraphOutline(MODEL), gpu),
        Choice({"layout": "channels-last"}, 0.8),
        Choice({"search": "exhaustive"}, 0.5),
    )
    path = default_path(MODEL, gpu.name)
    record.write(path)
    found["tuned"] = options()
    found["declined"] = options(tuned=False)
    refusals.append("no kernel for this")
    found["refused"] = ask()[0]
    found["its own"] = options(providers=[("CUDAExecutionProvider", {"prefer_nhwc": "0"})])
    path.rename(RECORD)
    found["named"] = options(tuned=RECORD)
    found["gone"] = options()
    os.utime(RECORD)
    text = open(RECORD).read().replace('"layout"', '"prefer_nhwc"')
    open(path, "w").write(text)
    messages = []

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    logging.getLogger("ortgpu").addHandler(Keep(level=logging.WARNING))
    found["void"] = options()
    found["said"] = [each for each in messages if "tune" in each]
    import ortgpu.session.tuning.tuning as tuning

    searched = []

    def search(model, device):
        searched.append([model, device])
        record.write(path)

    tuning.tune_unless_tuned = search
    os.remove(path)
    found["now"] = options(tuned="now")
    found["at once"] = options(tuned="now")
    found["searched"] = searched
    report(found)
