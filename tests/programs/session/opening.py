"""Programs of ``tests/session/test_opening.py``."""

from __future__ import annotations

from tests.programs.machines import report


def counted() -> None:
    import os
    import sys
    import threading
    import warnings

    from ortgpu import GPUSession

    warnings.simplefilter("ignore")
    path, entered, opened = sys.argv[1], set(), []

    def note_opening(event, arguments):
        if event == "open" and arguments[0] == path:
            opened.append(arguments[1])

    def note_call(frame, event, _):
        code = frame.f_code
        if event == "call" and f"{os.sep}ortgpu{os.sep}" in code.co_filename and code.co_name != "<module>":
            entered.add(code)

    sys.addaudithook(note_opening)
    outcome = "opened"
    threading.setprofile(note_call)
    sys.setprofile(note_call)
    try:
        session = GPUSession(path)
    except Exception as error:
        outcome = type(error).__name__
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    report([outcome, len(opened), len(entered)])
