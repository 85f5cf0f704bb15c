"""The shared objects that are in this process, as the kernel lists them."""

from __future__ import annotations


def mapped_libraries(maps: str) -> tuple[str, ...]:
    """Paths of the shared objects named in the text of /proc/self/maps, in order, each once."""
    paths = (line.split(None, 5)[5].strip() for line in maps.splitlines() if line.count("/") and ".so" in line)
    return tuple(dict.fromkeys(path.removesuffix(" (deleted)") for path in paths))


def read_mapped_libraries() -> tuple[str, ...]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            return mapped_libraries(file.read())
    except OSError:
        return ()
