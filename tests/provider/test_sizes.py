"""Sizes as arguments and variables name them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortgpu.provider import sizes


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0), (7, 7), (np.int64(9), 9), ("2GiB", 2 << 30), ("2GB", 2 * 10**9), ("512MiB", 512 << 20),
        ("1.5 KiB", 1536), ("0.5mb", 500_000), ("123", 123), ("123B", 123), ("1TiB", 1 << 40), (" 3KB ", 3000),
        (str(2**63 + 1), 2**63 + 1),
    ],
)  # fmt: skip
def test_a_size_is_bytes_or_a_text(value: Any, size: int) -> None:
    assert sizes.parse_size("limit", value) == size


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("", ValueError), ("2G", ValueError), ("-1GiB", ValueError), ("GiB", ValueError), ("2 gigabytes", ValueError),
        ("1e9", ValueError), ("0x10", ValueError), ("nan", ValueError), (-1, ValueError), (0.5, TypeError),
        (None, TypeError), ([1], TypeError), (b"2GiB", TypeError),
    ],
)  # fmt: skip
def test_another_value_raises(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        sizes.parse_size("limit", value)


@pytest.mark.parametrize(
    ("value", "size"),
    [(0.25, 0.25), (1.0, 1.0), ("0.25", 0.25), (".5", 0.5), ("1.0", 1.0), (1, 1), ("1", 1), ("2GiB", 2 << 30)],
)
def test_a_part_of_the_gpu_is_a_float(value: Any, size: float) -> None:
    found = sizes.parse_gpu_size("memory", value)
    assert (found, type(found)) == (size, type(size))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError), (0.0, ValueError), (1.5, ValueError), (-0.1, ValueError), (float("nan"), ValueError),
        (-5, ValueError), ("0", ValueError), ("0.0", ValueError), ("half", ValueError), (True, TypeError),
        (None, TypeError), (b"1", TypeError), ([0.5], TypeError),
    ],
)  # fmt: skip
def test_no_part_of_the_gpu_raises_and_names_the_argument(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^budget must be"):
        sizes.parse_gpu_size("budget", value)


def test_a_variable_names_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sizes.VARIABLE, raising=False)
    assert sizes.memory_by_variable() is None
    monkeypatch.setenv(sizes.VARIABLE, "")
    assert sizes.memory_by_variable() is None
    monkeypatch.setenv(sizes.VARIABLE, "0.5")
    assert sizes.memory_by_variable() == 0.5
    monkeypatch.setenv(sizes.VARIABLE, "lots")
    with pytest.raises(ValueError, match=r"^ORTGPU_MEMORY must be"):
        sizes.memory_by_variable()


def test_a_part_needs_a_gpu_of_known_size() -> None:
    assert sizes.bytes_of_gpu(0.25, 1000) == 250
    assert sizes.bytes_of_gpu(300, None) == 300
    with pytest.raises(ValueError, match=r"memory=0\.25"):
        sizes.bytes_of_gpu(0.25, None)
