"""Files that are whole, and that a guard of the system lets nobody open: fapolicyd of RHEL, a virus scanner."""

from __future__ import annotations

import pytest

from tests.faults.case import MENDED, library, own_path
from tests.lab.fixtures import Lab

# The kernel asks the process that this starts who may open a file, fanotify(7), as it asks fapolicyd.
GUARD = """
import ctypes, os, struct
def guard(path):
    libc = ctypes.CDLL(None, use_errno=True)
    asked = libc.fanotify_init(4, os.O_RDONLY)  # FAN_CLASS_CONTENT
    if asked < 0 or libc.fanotify_mark(asked, 1, ctypes.c_uint64(0x10000), -100, os.fsencode(path)):  # FAN_OPEN_PERM
        report("fanotify: " + os.strerror(ctypes.get_errno()))
        raise SystemExit
    if os.fork() == 0:
        while data := os.read(asked, 4096):
            for size, _, _, _, _, file, _ in struct.iter_unpack("IBBHQii", data):
                os.write(asked, struct.pack("iI", file, 2))  # FAN_DENY
                os.close(file)
    os.close(asked)
"""


@pytest.mark.parametrize("ask", ["open_session({model!r}, {{}})", "diagnose_here(True)"], ids=["session", "probe"])
@pytest.mark.parametrize(
    "pattern",
    [
        library("libcudart"),
        "onnxruntime/capi/libonnxruntime_providers_shared.so",
        "onnxruntime/capi/onnxruntime_pybind11_state*.so",
    ],
)
def test_what_the_system_lets_nobody_open_is_not_installed_again(lab: Lab, pattern: str, ask: str) -> None:
    machine = lab.machine()
    path = own_path(machine.overlay, pattern)
    machine.overlay.replace(path, (machine.overlay.site / path).read_bytes())  # a file of its own, that no other sees
    asked = ask.format(model=str(lab.models.relu))
    found = machine.run(f"{GUARD}\nguard({str(machine.overlay.site / path)!r})\n{asked}").ok().json
    if isinstance(found, str):
        pytest.skip(f"who may open a file cannot be decided here: {found}")
    error = found["error"]
    assert "operation not permitted" in error["text"].lower()
    assert "damaged" not in error["summary"], error["text"]
    assert "pip" not in error["text"]
    (fix,) = error["fixes"]
    assert f"fapolicyd-cli --file add {(machine.overlay.site / path).parent}/ &&" in fix
    after = machine.run(asked).ok().json["error"]
    assert after["type"] == MENDED, "without that guard, the file was all that was wrong"
