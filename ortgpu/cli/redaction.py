"""Redaction of user names, home folders and the host's name in reports."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ortgpu.errors import Fix, GPUError

if sys.platform != "win32":
    import pwd

HOME, USER, HOST, CREDENTIALS, VALUE = "~", "<user>", "<host>", "<credentials>", "<value>"

# Generic names of accounts and machines, and words that reports contain.
_NO_NAMES = frozenset(
    (
        *("root", "user", "admin", "nobody", "home", "app", "test", "ubuntu", "debian", "ec2-user", "conda", "jovyan"),
        *("nvidia", "cuda", "cudnn", "gpu", "cpu", "onnx", "onnxruntime", "ort", "ortgpu", "torch", "python", "pip"),
        *("docker", "linux", "windows", "driver", "host", "localhost", "lib", "bin", "usr", "tmp", "opt", "site"),
    )
)
# The user in home folders of anybody: /home/x, /users/x, /nfs/home/x, /mnt/disk/home2/x, and C:\Users\First Last. On
# Windows a name ends at the next folder, a quotation mark or the end.
_ANY_HOME = re.compile(
    r"((?<![\w.~-])/(?:(?:export|mnt|net|nfs|var)/)?(?:[\w.-]+/)?(?:home\d*|homes|users)/)[^/\\\s:;,'\"]+"
    r"|(\b[A-Z]:[/\\]+Users[/\\]+)(?:[^/\\\s:;,'\"]+ ){0,3}(?:[^/\\\s:;,'\"]+(?=[/\\:;,'\"]|$)|[^/\\\s:;,'\"]+)",
    re.IGNORECASE,
)
# User, password and token precede the name of a server. A path variable is split at the colon between them.
_CREDENTIALS = re.compile(r"(?:(?<=://)[^\s/]+|(?<![\w.%+-])[\w.%+~!$&*=-]+)@(?=[\w\[])")
# Variables of launchers hold addresses, commands and tokens of the site.
_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_")


class Redactor:
    """A function that redacts a text.

    It replaces the given home folders by "~", and the given names by "<user>" and "<host>". It also replaces the user
    in other home folders, and the text before the name of a server in an address.

    Not replaced: names inside other words, names of one or two letters outside paths, serial numbers and UUIDs.
    """

    def __init__(self, homes: Iterable[str], users: Iterable[str], hosts: Iterable[str]) -> None:
        self._rules: list[tuple[re.Pattern[str], str]] = []
        flags = re.IGNORECASE if os.name == "nt" else 0
        for home in sorted({home.rstrip("/\\") for home in homes}, key=len, reverse=True):
            if os.path.isabs(home) and os.path.dirname(home) != home:  # The home "/" is no real home.
                self._rules.append((re.compile(re.escape(home) + r"(?![\w.-])", flags), HOME))
        for names, replacement in ((users, USER), (hosts, HOST)):
            for name in sorted(set(names), key=len, reverse=True):
                if name and name.lower() not in _NO_NAMES:
                    self._rules.append((re.compile(_pattern_of_name(name), re.IGNORECASE), replacement))

    def __call__(self, text: str) -> str:
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        text = _ANY_HOME.sub(lambda home: f"{home[1] or home[2]}{USER}", text)
        return _CREDENTIALS.sub(f"{CREDENTIALS}@", text)


def _pattern_of_name(name: str) -> str:
    if len(name) < 3:  # Names like "a" or "me" would match in every sentence.
        return rf"(?<=[/\\]){re.escape(name)}(?=[/\\]|$)"
    return rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"


def redactor_for_this_process() -> Redactor:
    """Return a redactor for the user and host of this process, as far as the system tells them."""
    homes = {os.path.expanduser("~"), os.environ.get("HOME", ""), os.environ.get("USERPROFILE", "")}
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    if sys.platform != "win32":
        with contextlib.suppress(KeyError):  # In containers a user id may have no name.
            account = pwd.getpwuid(os.getuid())
            homes.add(account.pw_dir)
            users.add(account.pw_name)
    users |= {os.path.basename(home) for home in homes}
    homes |= {os.path.realpath(home) for home in homes if os.path.isabs(home)}
    host = socket.gethostname()
    return Redactor(homes, users, {host, host.partition(".")[0], os.environ.get("HOSTNAME", "")})


def redact(value: Any, replace: Callable[[str], str]) -> Any:
    """Redact each text in ``value``, dataclasses, errors and containers too, but no names of fields and keys.

    Variables that configure launchers lose their values.
    """
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
        hidden = {key for key, item in value.items() if str(key).startswith(_OF_LAUNCHERS) and isinstance(item, str)}
        return {key: VALUE if key in hidden else redact(item, replace) for key, item in value.items()}
    return value
