"""Redaction of user names, home folders and the host's name in reports."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Callable, Iterable
from typing import Any

from ortgpu.errors import Fix, GPUError

HOME, USER, HOST = "~", "<user>", "<host>"

# Generic names of accounts and machines, and words that reports contain.
_NO_NAMES = frozenset(
    (
        *("root", "user", "admin", "nobody", "home", "app", "test", "ubuntu", "debian", "ec2-user", "conda", "jovyan"),
        *("nvidia", "cuda", "cudnn", "gpu", "cpu", "onnx", "onnxruntime", "ort", "ortgpu", "torch", "python", "pip"),
        *("docker", "linux", "windows", "driver", "host", "localhost", "lib", "bin", "usr", "tmp", "opt", "site"),
    )
)
# Home folders of anybody: /home/x, /var/home/x, /Users/x, C:\Users\x
_ANY_HOME = re.compile(r"((?<![\w.~-])/(?:(?:var/|export/)?home|Users)/|\b[A-Za-z]:[/\\]+Users[/\\]+)[^/\\\s:;,'\"]+")


class Redactor:
    """A function that redacts a text.

    It replaces the given home folders by "~", the given names by "<user>" and "<host>", and the user in other home
    folders.

    Not replaced: names inside other words, names of one or two letters outside paths, serial numbers and UUIDs.
    """

    def __init__(self, homes: Iterable[str], users: Iterable[str], hosts: Iterable[str]) -> None:
        self._rules: list[tuple[re.Pattern[str], str]] = []
        flags = re.IGNORECASE if os.name == "nt" else 0
        for home in sorted({home.rstrip("/\\") for home in homes}, key=len, reverse=True):
            if os.path.isabs(home) and os.path.dirname(home) != home:  # a home "/" is no home
                self._rules.append((re.compile(re.escape(home) + r"(?![\w.-])", flags), HOME))
        for names, replacement in ((users, USER), (hosts, HOST)):
            for name in sorted(set(names), key=len, reverse=True):
                if name and name.lower() not in _NO_NAMES:
                    self._rules.append((re.compile(_as_name(name), re.IGNORECASE), replacement))

    def __call__(self, text: str) -> str:
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return _ANY_HOME.sub(rf"\1{USER}", text)


def _as_name(name: str) -> str:
    if len(name) < 3:  # "a" or "me" would match in every sentence
        return rf"(?<=[/\\]){re.escape(name)}(?=[/\\]|$)"
    return rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"


def redactor_for_this_process() -> Redactor:
    """Return a redactor for the user and host of this process, as far as the system tells them."""
    homes = {os.path.expanduser("~"), os.environ.get("HOME", ""), os.environ.get("USERPROFILE", "")}
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    try:
        import pwd

        account = pwd.getpwuid(os.getuid())
    except (ImportError, KeyError):  # Windows; a user id without a name, in containers
        pass
    else:
        homes.add(account.pw_dir)
        users.add(account.pw_name)
    users |= {os.path.basename(home) for home in homes}
    homes |= {os.path.realpath(home) for home in homes if os.path.isabs(home)}
    host = socket.gethostname()
    return Redactor(homes, users, {host, host.partition(".")[0], os.environ.get("HOSTNAME", "")})


def redact(value: Any, replace: Callable[[str], str]) -> Any:
    """Redact each text in ``value``, dataclasses, errors and containers too, but no names of fields and keys."""
    if isinstance(value, Fix):
        return Fix(replace(value), kind=value.kind, needs=value.needs)
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, GPUError):
        return type(value)(
            replace(value.summary),
            evidence=redact(value.evidence, replace),
            fixes=redact(value.fixes, replace),
            others=redact(value.others, replace),
            consequence_of=value.consequence_of,
            severity=value.severity,
            **redact(value.details(), replace),
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: redact(getattr(value, field.name), replace) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    if isinstance(value, (tuple, list, set, frozenset)):
        return type(value)(redact(item, replace) for item in value)
    if hasattr(value, "items"):
        return {key: redact(item, replace) for key, item in value.items()}
    return value
