"""Images built as a Dockerfile says, without Docker: each stage is a folder, in which its commands run by chroot.

The base is made by debootstrap, with the packages of Debian's slim image. Of Dockerfiles it knows what ours have: FROM,
RUN, COPY, ENV, WORKDIR and CMD.
"""

from __future__ import annotations

import fcntl
import functools
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.environments import call, kept_folder, network_variables
from tests.lab.overlay import LabError

_TOOLS = {"debootstrap": "debootstrap", "unshare": "util-linux", "mount": "util-linux", "chroot": "coreutils"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INSIDE = """
mount --make-rprivate /
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
root=$1 folder=$2; shift 2
exec chroot "$root" /bin/sh -c 'cd "$0" && exec "$@"' "$folder" "$@"
"""


@functools.cache
def why_not_here() -> str | None:
    """Why no image can be built here, or None when it can."""
    missing = [
        package for tool, package in _TOOLS.items() if shutil.which(tool, path=f"{os.environ['PATH']}:{PATH}") is None
    ]
    if missing:
        return f"images are built with {', '.join(missing)}, which is not here: apt install {' '.join(missing)}"
    if os.geteuid() != 0:
        return "images are built by root, for whom chroot is"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, timeout=60, check=False)
    return f"no namespace of mounts can be made: {done.stderr.strip()}" if done.returncode else None


@dataclass
class Stage:
    """What was built: the root folder, and what CMD is started with."""

    root: Path
    base: str
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    command: list[str] = field(default_factory=list)

    def arguments(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> list[str]:
        """The command line that runs ``command`` in this root, for a process of this machine."""
        given = [f"{name}={value}" for name, value in {"PATH": PATH, **self.variables, **(variables or {})}.items()]
        inside = ["env", "--ignore-environment", *given, *command]
        return ["unshare", "--mount", "sh", "-ec", _INSIDE, "sh", str(self.root), self.folder, *inside]

    def size(self) -> int:
        """Its bytes on the disk."""
        return int(call(["du", "--summarize", "--bytes", "--one-file-system", str(self.root)]).split()[0])


def build(dockerfile: Path, context: Path, folder: Path) -> Stage:
    """Build the last stage. Raises LabError, with what it printed, where a step fails."""
    stages: dict[str, Stage] = {}
    for instruction, rest in _instructions(dockerfile.read_text(encoding="utf-8")):
        if instruction == "FROM":
            image, _, name = rest.partition(" AS ")
            stage = stages[name or "last"] = Stage(folder / (name or "last"), image)
            call(["cp", "-a", str(_base(image)), str(stage.root)])
        elif instruction == "RUN":
            _run(stage, rest)
        elif instruction == "COPY":
            _copy(stage, shlex.split(rest), stages, context)
        elif instruction == "ENV":
            for each in shlex.split(rest):
                name, _, value = each.partition("=")
                stage.variables[name] = value
        elif instruction == "WORKDIR":
            stage.folder = rest
        elif instruction == "CMD":
            stage.command = json.loads(rest)
        else:
            raise LabError(f"{instruction} is not known here")
    return stage


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest.strip()) for name, rest in re.findall(r"^([A-Z]+) (.*)$", lines, re.MULTILINE)]


def _run(stage: Stage, line: str) -> None:
    """Run a line as `docker build` does, by this machine's way to the network, of which nothing stays in the image."""
    variables = dict(network_variables(stage.root))
    for name in ("PIP_FIND_LINKS", "PIP_CACHE_DIR"):  # folders of this machine; pip has its own cache in the image
        variables.pop(name, None)
    lent = stage.root / "run" / "lent"
    lent.mkdir(parents=True)
    for name, value in variables.items():
        if Path(value).is_file():
            shutil.copy(value, lent / name)
            variables[name] = f"/run/lent/{name}"
    shutil.copy("/etc/resolv.conf", stage.root / "etc" / "resolv.conf")
    try:
        call(stage.arguments(["/bin/sh", "-c", line], variables))
    finally:
        shutil.rmtree(lent)


def _copy(stage: Stage, words: list[str], stages: Mapping[str, Stage], context: Path) -> None:
    origin = context
    if words[0].startswith("--from="):
        origin = stages[words.pop(0).removeprefix("--from=")].root
    *sources, target = words
    destination = stage.root / target.lstrip("/")
    for pattern in sources:
        for found in glob.glob(str(origin / pattern.lstrip("/"))):
            if os.path.isdir(found):
                call(["cp", "-a", f"{found}/.", str(_made(destination))])
            else:
                call(["cp", "-a", found, str(_made(destination))])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _base(image: str) -> Path:
    """The root of Debian's image, kept from run to run."""
    found = re.fullmatch(r"debian:(\w+)-slim", image)
    if found is None:
        raise LabError(f"{image} is not made here")
    root = kept_folder() / f"debian-{found[1]}"
    whole = Path(f"{root}.whole")  # written last
    root.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{root}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(root, ignore_errors=True)
            call(["debootstrap", "--variant=minbase", found[1], str(root)])
            for each in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
                call(["find", str(root / each), "-type", "f", "-delete"])
            whole.touch()
    return root
