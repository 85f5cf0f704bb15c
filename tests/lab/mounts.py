"""Mounts that one process sees, and those that it starts."""

from __future__ import annotations

from collections.abc import Iterable


def with_mounts(lines: Iterable[str]) -> list[str]:
    """What starts a process in a mount namespace of its own, after these lines of a shell."""
    return ["unshare", "--mount", "sh", "-ec", "\n".join(["mount --make-rprivate /", *lines, 'exec "$@"']), "sh"]
