"""Parse sizes of memory in arguments and environment variables."""

from __future__ import annotations

import operator
import os
import re
from typing import Any, TypeAlias

Size: TypeAlias = int | str
GPUSize: TypeAlias = int | float | str

VARIABLE = "ORTGPU_MEMORY"

_TEXT = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]i?B|B)?", re.IGNORECASE)
_POWERS = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(name: str, value: Any) -> int:
    """Return bytes from a number of bytes or a text: "2GiB" (1024 to the third), "2GB" (1000 to the third).

    Raises:
        TypeError: ``value`` has another type. The message names the argument ``name``.
        ValueError: ``value`` is no size, or is negative.
    """
    if isinstance(value, str):
        match = _TEXT.fullmatch(value.strip())
        if match is None:
            raise ValueError(f'{name} must be a number of bytes or a text such as "2GiB" or "500MB", not {value!r}')
        number, unit = match[1], (match[2] or "B").lower()
        size = float(number) * (1024 if "i" in unit else 1000) ** _POWERS[unit[0]]
        return int(number) if unit == "b" and number.isdecimal() else int(size)
    if isinstance(value, float):
        raise TypeError(f"{name} must be a whole number of bytes, not {value!r}")
    size = operator.index(value)
    if size < 0:
        raise ValueError(f"{name} must be at least 0, not {size}")
    return size


def parse_gpu_size(name: str, value: Any) -> int | float:
    """Return bytes as :func:`parse_size` does, or a float above 0 and up to 1: a part of the GPU's memory.

    Raises:
        TypeError, ValueError: as :func:`parse_size` raises, and for 0.
    """
    forms = f'{name} must be a number of bytes, a text such as "2GiB", or a part of the GPU above 0 and up to 1'
    if isinstance(value, str) and re.fullmatch(r"0?\.\d+|1\.0*", value.strip()):
        value = float(value)
    if isinstance(value, bool) or not (isinstance(value, (float, str)) or hasattr(value, "__index__")):
        raise TypeError(f"{forms}, not {value!r}")
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(f"{forms}, not {value!r}")
        return value
    try:
        size = parse_size(name, value)
    except ValueError:
        size = 0
    if not size:
        raise ValueError(f"{forms}, not {value!r}")
    return size


def memory_by_variable() -> int | float | None:
    """Return the size that the variable ORTGPU_MEMORY names; None if it is not set.

    Raises:
        ValueError: the variable names no size.
    """
    value = os.environ.get(VARIABLE, "")
    return parse_gpu_size(VARIABLE, value) if value else None


def bytes_of_gpu(size: int | float, total: int | None) -> int:
    """Return the bytes that a size means on a GPU with ``total`` bytes.

    Raises:
        ValueError: the size is a part of the GPU's memory, and the amount of memory is unknown.
    """
    if isinstance(size, int):
        return size
    if total is None:
        raise ValueError(f"memory={size}: the size of this GPU's memory is unknown, so name a number of bytes")
    return int(size * total)
