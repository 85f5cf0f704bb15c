"""What is mapped into a process, and what of it the loader has."""

from __future__ import annotations

import json
from pathlib import Path

from tests.lab.stubs import Stubs
from tests.support.children import run_python

CHILD = """
import ctypes, json, mmap, os, sys
from ortgpu.environment.libraries.search import places_of_this_process
folder = sys.argv[1]
kept = []
for name in ("libcurand.so.10", "libnccl.so.2", "libcufft.so.12", "linked/libcublas.so.13"):
    kept.append(ctypes.CDLL(os.path.join(folder, name)))
kept.append(mmap.mmap(os.open(os.path.join(folder, "libcudart.so.13"), os.O_RDONLY), 0, prot=mmap.PROT_READ))
for name in ("libcufft.so.12", "libcublas.so.13.1"):  # as an upgrade does under a program that runs
    os.replace(os.path.join(folder, "new", name), os.path.join(folder, name))
print(json.dumps([path for path in places_of_this_process().mapped if path.startswith(folder)]))
"""


def test_what_is_only_read_is_not_loaded_and_what_was_replaced_is(stubs: Stubs, tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    names = {name: name for name in ("libcurand.so.10", "libnccl.so.2", "libcufft.so.12", "libcudart.so.13")}
    for name, soname in {**names, "libcublas.so.13.1": "libcublas.so.13"}.items():
        made = stubs.library(soname).read_bytes()
        for place in (folder, folder / "new"):
            place.mkdir(exist_ok=True)
            (place / name).write_bytes(made)
    (folder / "linked").mkdir()
    (folder / "linked" / "libcublas.so.13").symlink_to(folder / "libcublas.so.13.1")
    found = {Path(path).name for path in json.loads(run_python(CHILD, str(folder)).ok().stdout)}
    assert found == {"libcurand.so.10", "libnccl.so.2", "libcufft.so.12", "libcublas.so.13.1"}
