"""The places of a process: its variables, its search path and what it has loaded."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ortgpu.environment.libraries.catalogue import spec_for
from ortgpu.environment.libraries.loader import read_mapped_libraries
from ortgpu.environment.libraries.search import places_for
from ortgpu.environment.libraries.wheel import ProviderLibrary, read_provider
from ortgpu.environment.packages.installed import Torch
from ortgpu.environment.packages.metadata import mapped_libraries
from tests.library_search.trees import MACHINE, NEEDED, Put
from tests.support.children import run_python

# What it has mapped

MAPS = """\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 131 /usr/bin/python3.11
7f00a0000000-7f00a0100000 r--p 00000000 08:01 132 /opt/with space/libcublas.so.13.1.0.3
7f00a0100000-7f00a0200000 r-xp 00100000 08:01 132 /opt/with space/libcublas.so.13.1.0.3
7f00a0300000-7f00a0400000 r--p 00000000 00:2a 133 /tmp/libcurand.so.10 (deleted)
7f00a0500000-7f00a0600000 rw-p 00000000 00:00 0
7f00a0700000-7f00a0800000 rw-p 00000000 00:00 0 [heap]
7f00a0900000-7f00a0a00000 r-xp 00000000 00:00 0 [vdso]
"""


def test_maps_of_a_process() -> None:
    assert mapped_libraries(MAPS) == ("/opt/with space/libcublas.so.13.1.0.3", "/tmp/libcurand.so.10")
    assert mapped_libraries("") == ()
    assert mapped_libraries(MAPS, 0x7F00A01FFFFF) == ("/opt/with space/libcublas.so.13.1.0.3",)
    assert mapped_libraries(MAPS, 0x7F00A0200000) == mapped_libraries(MAPS, 0x7F00A0500000) == ()


def test_maps_of_this_process() -> None:
    mapped = read_mapped_libraries()
    assert any(re.search(r"/libc[.-]", path) for path in mapped)
    assert all(os.path.isabs(path) for path in mapped)


# Where it looks

CHILD = """
import json, os, sys
from ortgpu.environment.libraries.search import places_for, resolve
from ortgpu.environment.libraries.wheel import ProviderLibrary
provider = ProviderLibrary("p.so", None, tuple(json.loads(sys.argv[1])), ("/rpath",), None)
{code}
places = places_for(provider, None)
found = {{one.soname: one.chosen.path for one in resolve(places, provider.needed, 13) if one.chosen}}
print(json.dumps([places.start_library_path, found]))
"""


def child(code: str, *, needed: Sequence[str] = NEEDED, **environment: str | None) -> tuple[str, dict[str, str]]:
    variables = {**os.environ, **environment}
    done = run_python(
        CHILD.format(code=code),
        json.dumps(needed),
        env={name: value for name, value in variables.items() if value is not None},
    ).ok()
    path, found = json.loads(done.stdout)
    return path, found


def test_the_library_path_is_the_one_at_start(tmp_path: Path, put: Put) -> None:
    folder = put(tmp_path / "libraries", "libcublas.so.4")
    needed = ["libcublas.so.4"]
    at_start, found = child("del os.environ['LD_LIBRARY_PATH']", needed=needed, LD_LIBRARY_PATH=str(folder))
    assert at_start == str(folder)
    assert found["libcublas.so.4"] == str(folder / "libcublas.so.4")
    at_start, found = child(f"os.environ['LD_LIBRARY_PATH'] = {str(folder)!r}", needed=needed, LD_LIBRARY_PATH=None)
    assert at_start == ""
    assert "libcublas.so.4" not in found


def test_a_library_that_python_has_opened_is_loaded_already(tmp_path: Path, put: Put) -> None:
    folder = put(tmp_path / "libraries", "libcublas.so.4")
    code = f"import ctypes; ctypes.CDLL({str(folder / 'libcublas.so.4')!r})"
    _, found = child(code, needed=["libcublas.so.4"])
    assert found["libcublas.so.4"] == str(folder / "libcublas.so.4")


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """As in a service whose release folder was replaced: relative places are nowhere, and that is all."""
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"sys.path.insert(0, ''); os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); os.environ['CUDA_HOME'] = 'cuda'"
    at_start, _ = child(code, LD_LIBRARY_PATH="lib:./other")
    assert at_start == "lib:./other"


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        (Torch("2.9.0+cu130", (13, 0), "/torch"), "/torch"),
        (Torch("2.9.0+cu128", (12, 8), "/torch"), None),
        (Torch("2.9.0+cpu", None, "/torch"), None),
        (None, None),
    ],
    ids=["same major", "another major", "CPU", "no torch"],
)
def test_only_a_torch_of_the_same_major(torch: Torch | None, expected: str | None) -> None:
    provider = ProviderLibrary("p.so", None, NEEDED, ("/rpath",), None)
    found = places_for(provider, torch, "/given")
    assert (found.torch_folder, found.directory) == (expected, "/given")
    assert found.provider_search_path == ("/rpath",)
    assert (found.sys_path, found.machine, found.filesystem) == (tuple(sys.path), MACHINE, Path("/"))


def test_the_search_path_of_a_provider_may_begin_where_it_lies() -> None:
    """As in builds that bring CUDA's libraries beside ONNX Runtime's, and in packages of conda."""
    provider = ProviderLibrary("/opt/capi/p.so", None, NEEDED, ("$ORIGIN/../cuda", "${ORIGIN}", "$ORIGINAL"), None)
    assert places_for(provider, None).provider_search_path == ("/opt/capi/../cuda", "/opt/capi", "$ORIGINAL")


FOUND = """
import json, sys
from ortgpu.environment.libraries.search import places_for, resolve
from ortgpu.environment.libraries.wheel import read_provider
provider = read_provider(sys.argv[1])
found = resolve(places_for(provider, None), provider.needed, provider.cuda_major)
print(json.dumps([[one.soname, one.spec.stem, one.required, one.chosen and one.chosen.root] for one in found]))
"""


def test_what_is_installed_here_is_found(provider_library: str) -> None:
    """A child looks: what an earlier test of this process opened would be found there."""
    found = json.loads(run_python(FOUND, provider_library).ok().stdout)
    required = {soname: root for soname, _, is_required, root in found if is_required}
    assert set(required) == {soname for soname in read_provider(provider_library).needed if spec_for(soname)}
    assert None not in required.values()
    assert len(set(required.values())) == 1
    assert next(root for _, stem, _, root in found if stem == "libcudnn_cnn") is not None
