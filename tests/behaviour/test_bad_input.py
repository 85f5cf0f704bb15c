"""What a disk, a driver or an environment holds and nobody meant: a finding or "unknown", never a traceback of ours.

Each environment is diagnosed and a session is asked for, in a child of its own. ELF files that are cut or altered
anywhere, and broken metadata as such, are read by the million in test_library_file.py and test_any_folder.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.case import library, own_path, truncating
from tests.faults.package_files import BRIDGE, CUDA_PROVIDER, EXTENSION
from tests.lab import GPU, NVML, Cuda, Overlay
from tests.lab.fixtures import Lab
from tests.lab.installed import LINKS_CUDNN, soname

AARCH64 = 183
GARBAGE = bytes(range(256)) * 8
DIST_INFO = "onnxruntime_gpu-*.dist-info"

# Root reads what nobody may read, unless it gives that right up: capset(2) with nothing in it.
AS_AN_ORDINARY_USER = """
import ctypes, os
if os.geteuid() == 0:
    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
    assert ctypes.CDLL(None).capset(ctypes.byref(Header(0x20080522, 0)), (ctypes.c_uint32 * 6)()) == 0
"""


@dataclass(frozen=True)
class Input:
    """``error``: the class that a session raises; on a machine without a driver, mostly that nothing else matters."""

    name: str
    breaks: Callable[[Lab, Overlay], object] = lambda _lab, _overlay: None
    error: str = "DriverNotFoundError"
    says: tuple[str, ...] = ()
    cuda: Cuda | None = None
    nvml: NVML | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    prelude: str = ""

    def __str__(self) -> str:
        return self.name


def metadata(file: str, content: bytes) -> Callable[[Lab, Overlay], object]:
    return lambda _lab, overlay: overlay.replace(f"{own_path(overlay, DIST_INFO)}/{file}", content)


def record_that_leads_outside(_lab: Lab, overlay: Overlay) -> None:
    lines = b"../../../../etc/passwd,sha256=x,1\n/etc/shadow,,\nonnxruntime/__init__.py,,\nonnxruntime/\xff,,\n,,\n"
    overlay.replace(f"{own_path(overlay, DIST_INFO)}/RECORD", lines)


def metadata_folder_is_a_file(_lab: Lab, overlay: Overlay) -> None:
    name = own_path(overlay, DIST_INFO)
    overlay.remove(name).replace(name, GARBAGE)


def metadata_folder_is_a_loop(_lab: Lab, overlay: Overlay) -> None:
    name = own_path(overlay, DIST_INFO)
    overlay.remove(name)
    (overlay.site / name).symlink_to(overlay.site / name)


def names_that_are_not_utf8(_lab: Lab, overlay: Overlay) -> None:
    site = os.fsencode(overlay.site)
    for folder in (b"\xff\xfe-1.0.dist-info", b"onnxruntime_\xe9-1.0.dist-info", b"nvidia/\xff/lib"):
        os.makedirs(os.path.join(site, folder))
    for file in (
        b"\xff\xfe-1.0.dist-info/METADATA",
        b"nvidia/\xff/lib/" + os.fsencode(soname("libcublas")),
        b"onnxruntime/capi/\xfe.so",
    ):
        with open(os.path.join(site, file), "wb") as made:
            made.write(GARBAGE)


def loops(_lab: Lab, overlay: Overlay) -> None:
    for name, target in (
        ("nvidia/again", "../nvidia"),
        ("nvidia/itself", "itself"),
        ("nvidia/up", "../.."),
        ("onnxruntime/capi/capi", "../capi"),
        ("loop", "."),
    ):
        (overlay.site / name).symlink_to(target, target_is_directory=True)


def forbid(*folders: str) -> Callable[[Lab, Overlay], object]:
    def breaks(_lab: Lab, overlay: Overlay) -> None:
        for pattern in folders:
            name = own_path(overlay, pattern)
            overlay.take_apart(name)
            assert not (overlay.site / name).is_symlink(), "the original is not to be changed"
            (overlay.site / name).chmod(0)

    return breaks


def forbid_folder_of(pattern: str) -> Callable[[Lab, Overlay], object]:
    return lambda lab, overlay: forbid(os.path.dirname(own_path(overlay, pattern)))(lab, overlay)


def forbid_file(pattern: str) -> Callable[[Lab, Overlay], object]:
    def breaks(_lab: Lab, overlay: Overlay) -> None:
        name = own_path(overlay, pattern)
        content = (overlay.site / name).read_bytes()
        overlay.replace(name, content)  # a file of its own: a link would change the original
        (overlay.site / name).chmod(0)

    return breaks


def for_another_machine(pattern: str) -> Callable[[Lab, Overlay], object]:
    def breaks(_lab: Lab, overlay: Overlay) -> None:
        name = own_path(overlay, pattern)
        content = bytearray((overlay.site / name).read_bytes())
        content[18:20] = AARCH64.to_bytes(2, "little")
        overlay.replace(name, bytes(content))

    return breaks


def nvml_is_text(_lab: Lab, overlay: Overlay) -> None:
    (overlay.root / "nvml").mkdir()
    (overlay.root / "nvml" / "libnvidia-ml.so.1").write_bytes(GARBAGE)


def put(name: str, content: bytes) -> Callable[[Lab, Overlay], object]:
    return lambda _lab, overlay: overlay.replace(name, content)


INPUTS = [
    *(
        Input(f"{file}-{word}", metadata(file, content))
        for file in ("METADATA", "RECORD")
        for word, content in (
            ("empty", b""),
            ("garbage", GARBAGE),
            ("without-lines", b"x" * 2_000_000),
            ("cut", b'onnxruntime/__init__.py,sha256=abc,12\nonnxruntime/capi/"'),
        )
    ),
    Input("RECORD-leads-outside", record_that_leads_outside),
    Input("metadata-folder-is-a-file", metadata_folder_is_a_file),
    Input("metadata-folder-is-a-loop", metadata_folder_is_a_loop),
    Input("top-level-garbage", metadata("top_level.txt", GARBAGE)),
    Input(
        "build-info-garbage",
        put("onnxruntime/capi/build_and_package_info.py", GARBAGE),
        "DriverNotFoundError",
        ("libcuda.so.1",),  # The import does without it, so it is not what keeps a session off the GPU.
    ),
    Input("names-not-utf8", names_that_are_not_utf8),
    Input("loops", loops),
    Input("forbidden-metadata", forbid(DIST_INFO), prelude=AS_AN_ORDINARY_USER),
    Input(
        "forbidden-wheels",
        forbid("nvidia/cudnn"),
        "LibraryNotFoundError" if LINKS_CUDNN else "DriverNotFoundError",
        prelude=AS_AN_ORDINARY_USER,
    ),
    Input(
        "forbidden-libraries",
        forbid_folder_of(library("libcublas")),
        "LibraryNotFoundError",
        (soname("libcublas"),),
        prelude=AS_AN_ORDINARY_USER,
    ),
    Input(
        "forbidden-library",
        forbid_file(library("libcurand")),
        "LibraryNotFoundError",
        ("libcurand.so.10", "permission denied"),
        prelude=AS_AN_ORDINARY_USER,
    ),
    Input(
        "forbidden-provider",
        forbid_file(CUDA_PROVIDER),
        "BrokenPackageError",
        ("libonnxruntime_providers_cuda.so", "permission denied"),
        prelude=AS_AN_ORDINARY_USER,
    ),
    Input("forbidden-package", forbid("onnxruntime"), "PackageError", ("onnxruntime",), prelude=AS_AN_ORDINARY_USER),
    *(
        Input(f"{word}-cut-at-{size}", truncating(pattern, size), error, (name,))
        for word, pattern, error, name in (
            ("provider", CUDA_PROVIDER, "BrokenPackageError", "libonnxruntime_providers_cuda.so"),
            ("bridge", BRIDGE, "BrokenPackageError", "libonnxruntime_providers_shared.so"),
            ("library", library("libcublasLt"), "LibraryNotFoundError", soname("libcublasLt")),
        )
        for size in (1, 17, 63, 64, 700)
    ),
    Input(
        "provider-for-another-machine",
        for_another_machine(CUDA_PROVIDER),
        "BrokenPackageError",
        ("libonnxruntime_providers_cuda.so",),
        cuda=Cuda(),  # its size is right and its header is whole: it is the loader that knows, where there is a driver
    ),
    Input(
        "extension-for-another-machine",
        for_another_machine(EXTENSION),
        "BrokenPackageError",
        ("onnxruntime_pybind11_state",),
    ),
    *(Input(f"nvml-answers-{code}", nvml=NVML(error=code)) for code in (1, 3, 15, 999, 12345)),
    *(
        Input(f"nvml-refuses-{code}", error="DriverUnusableError", cuda=Cuda(init=999), nvml=NVML(init=code))
        for code in (9, 18, 999, 12345)
    ),
    Input("nvml-is-text", nvml_is_text, env={"LD_LIBRARY_PATH": "{overlay}/nvml"}),
    Input("nvml-module-broken", put("pynvml.py", b"raise OSError('no')\n")),
    Input("nvml-module-is-another", put("pynvml.py", b"nvmlInit = None\n")),
    Input("nvml-knows-nothing-of-its-gpus", nvml=NVML(gpus=(GPU(uuid="", name="", total=0, free=0),))),
    Input(
        "variables-not-utf8",
        env={
            "CUDA_VISIBLE_DEVICES": "\udcff",
            "PYTHONPATH": "/\udcfe",
            "CUDA_HOME": "\udcff",
            "LD_LIBRARY_PATH": "/\udcff",
            "PATH": "/\udcff",
        },
        error="GPUError",
    ),
    Input("variables-absurd", env=dict.fromkeys(("CUDA_HOME", "CONDA_PREFIX", "PYTHONPATH"), "x" * 100_000)),
]

DIAGNOSED = """
import json
import ortgpu
found = ortgpu.diagnose()
text = json.dumps(found.as_dict())
for problem in found.problems:
    assert str(problem)
diagnosed = [problem.code for problem in found.problems]
"""


@pytest.mark.parametrize("given", INPUTS, ids=str)
def test_a_finding_and_no_traceback(lab: Lab, given: Input) -> None:
    machine = lab.machine(cuda=given.cuda, nvml=given.nvml)
    given.breaks(lab, machine.overlay)
    env = {name: value.replace("{overlay}", str(machine.overlay.root)) for name, value in given.env.items()}
    reported = "import sys; print(json.dumps(diagnosed), file=sys.stderr)"
    code = f"{given.prelude}{DIAGNOSED}\nopen_session({str(lab.models.relu)!r}, {{}})\n{reported}"
    result = machine.but(env=env).run(code).ok()
    error = result.json["error"]
    assert error is not None, result.output
    assert "GPUError" in error["bases"], result.output
    assert given.error in error["bases"], error["text"]
    for word in given.says:
        assert word.lower() in error["text"].lower(), error["text"]
    diagnosed = json.loads(result.stderr.strip().splitlines()[-1])
    assert diagnosed or given.cuda, "there is no driver, and nothing was found"


def test_the_rights_are_really_given_up(lab: Lab, tmp_path: Path) -> None:
    forbidden = tmp_path / "forbidden"
    forbidden.mkdir(mode=0)
    attempt = f"try:\n    os.listdir({str(forbidden)!r})\nexcept OSError as error:\n    report(str(error))"
    code = f"{AS_AN_ORDINARY_USER}\nimport os\n{attempt}"
    assert "Permission denied" in lab.machine().run(code).ok().json
