"""A library that fails says why on its own standard error."""

from __future__ import annotations

from ortgpu.diagnosis.probe.probing import MARK, parse_report


def test_each_step_has_its_own() -> None:
    lines = [
        "before",
        MARK + '{"begin": "driver"}',
        *(f"line {number}" for number in range(40)),
        "",
        MARK + '{"end": "driver", "ok": false, "data": {"code": 999}}',
        MARK + '{"begin": "libraries"}',
        "of the libraries",
        MARK + '{"end": "libraries", "ok": true}',
        MARK + '{"done": true}',
    ]
    result = parse_report("\n".join(lines), 0, 1.0)
    driver, libraries = result.steps
    assert driver.data == {"code": 999, "printed": [f"line {number}" for number in (*range(10), *range(20, 40))]}
    assert libraries.data == {}
