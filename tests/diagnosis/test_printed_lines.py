"""A library that fails says why on its own standard error."""

from __future__ import annotations

from typing import Any

from ortgpu.diagnosis.probe.probing import result_of


def test_each_step_has_its_own() -> None:
    """Offsets count bytes, and what is printed need not be ASCII."""
    before, said = "vor\u00fcber\n".encode(), "".join(f"line {number}\n" for number in range(40)).encode() + b"\n"
    end = len(before) + len(said)
    entries: list[dict[str, Any]] = [
        {"begin": "driver", "printed": len(before)},
        {"end": "driver", "ok": False, "detail": "", "data": {"code": 999}, "printed": end},
        {"begin": "libraries", "printed": end},
        {"end": "libraries", "ok": True, "detail": "", "data": {}, "printed": end + 17},
        {"done": True, "printed": end + 17},
    ]
    result = result_of(entries, before + said + b"of the libraries\n", 0, 1.0)
    driver, libraries = result.steps
    assert driver.data == {"code": 999, "printed": [f"line {number}" for number in (*range(10), *range(20, 40))]}
    assert libraries.data == {}
    assert result.completed
