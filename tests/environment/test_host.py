"""The machine, read from prepared trees of files and from the machine itself."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortgpu.environment.host import (
    _read_open_files,
    parse_memory_limit,
    read_host,
)

GIB = 1 << 30
NOWHERE: dict[str, str] = {}


def put(root: Path, path: str, text: str = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_system_without_the_files_of_linux() -> None:
    """Windows, where MSYS2 or Wine may have an /etc and a /proc."""
    host = read_host(None, NOWHERE)
    assert (host.os_name, host.memory_total, host.container, host.display_vendors) == (None, None, None, None)
    assert (host.libc, host.wsl, host.kernel) == (None, False, platform.release())
    assert read_host(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).container == "kubernetes"


def test_an_empty_tree_is_all_unknown(tmp_path: Path) -> None:
    host = read_host(tmp_path, NOWHERE)
    assert (host.os_name, host.memory_total, host.container, host.display_vendors) == (None, None, None, None)
    assert host.python == sys.version_info[:3]
    assert host.executable == sys.executable
    assert host.frozen is False


@pytest.mark.parametrize(("machine", "own"), [("x86_64", "i686"), ("AMD64", "x86"), ("riscv64", "riscv64")])
def test_a_python_for_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, own: str) -> None:
    """The system is asked for the machine, and says what the kernel runs on."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert read_host(tmp_path, NOWHERE).machine == machine
    monkeypatch.setattr(sys, "maxsize", (1 << 31) - 1)
    assert read_host(tmp_path, NOWHERE).machine == own


def test_a_tree_of_wrong_things_is_unknown_too(tmp_path: Path) -> None:
    for path in ("etc/os-release", "proc/meminfo", "proc/self/cgroup", "sys/fs/cgroup/memory.max"):
        (tmp_path / path).mkdir(parents=True)  # a folder where a file is expected
    put(tmp_path, "sys/bus/pci/devices", "a file where a folder is expected")
    host = read_host(tmp_path, NOWHERE)
    assert (host.os_name, host.memory_total, host.display_vendors) == (None, None, None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="compares with Linux's own answers")
def test_this_machine() -> None:
    host = read_host()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.system == "Linux"
    assert host.machine == os.uname().machine
    assert host.kernel == os.uname().release
    assert host.memory_total is not None
    assert 0 < host.memory_total <= pages
    assert host.libc is None or host.libc.startswith(("glibc ", "musl"))


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"COLAB_RELEASE_TAG": "release-colab_20260910"}, "Google Colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": ""}, "Kaggle"),
        ({"AWS_LAMBDA_FUNCTION_NAME": "f"}, "AWS Lambda"),
        ({"K_SERVICE": "s"}, "Google Cloud Run"),
        ({"K_SERVICE": "s", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"SPACE_ID": "a/b"}, "Hugging Face Spaces"),
        ({"SPACE_ID": "a/b", "SPACES_ZERO_GPU": "true"}, "Hugging Face ZeroGPU"),
        ({"SPACE_ID": ""}, None),
    ],
)
def test_a_service_by_its_variables(tmp_path: Path, variables: dict[str, str], name: str | None) -> None:
    assert read_host(tmp_path, variables).service == name


# Memory


def test_memory_is_physical_where_nothing_limits_it(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    put(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert read_host(tmp_path, NOWHERE).memory_total == 16 * GIB


@pytest.mark.parametrize(
    ("cgroup", "limits"),
    [
        pytest.param("0::/\n", {"memory.max": 2 * GIB}, id="v2-container"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": 2 * GIB, "a/memory.max": 8 * GIB}, id="v2-own"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": 8 * GIB, "a/memory.max": 2 * GIB}, id="v2-ancestor"),
        pytest.param("0::/host/path\n", {"memory.max": 2 * GIB}, id="v2-path-of-the-host"),
        pytest.param("4:memory:/docker/ab\n", {"memory/memory.limit_in_bytes": 2 * GIB}, id="v1-container"),
        pytest.param("4:cpu,memory:/slurm/job\n0::/\n", {"memory/slurm/memory.limit_in_bytes": 2 * GIB}, id="v1-job"),
    ],
)
def test_memory_is_what_the_cgroup_allows(tmp_path: Path, cgroup: str, limits: dict[str, int]) -> None:
    put(tmp_path, "proc/meminfo", "MemTotal: 16777216 kB\n")
    put(tmp_path, "proc/self/cgroup", cgroup)
    for path, limit in limits.items():
        put(tmp_path, f"sys/fs/cgroup/{path}", f"{limit}\n")
    assert read_host(tmp_path, NOWHERE).memory_total == 2 * GIB


@pytest.mark.parametrize("text", ["", "max", "-1", "0", "9223372036854771712", "1" * 5000, "²", "12 34"])
def test_what_limits_nothing(text: str) -> None:
    assert parse_memory_limit(text) is None


# Containers


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        (".singularity.d/runscript", "", "apptainer"),
        ("proc/1/environ", "PATH=/bin\0container=lxc\0", "lxc"),
        ("proc/1/environ", "container=systemd-nspawn", "systemd-nspawn"),
        ("run/systemd/container", "podman\n", "podman"),
    ],
)
def test_a_container_by_its_marks(tmp_path: Path, path: str, text: str, name: str) -> None:
    assert read_host(tmp_path, NOWHERE).container is None
    put(tmp_path, path, text)
    assert read_host(tmp_path, NOWHERE).container == name


def test_kubernetes_before_the_runtime_below_it(tmp_path: Path) -> None:
    put(tmp_path, ".dockerenv")
    assert read_host(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).container == "kubernetes"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param("proc/1/environ", "xcontainer=lxc\0", id="another-variable"),
        pytest.param("run/systemd/container", "wsl", id="wsl-is-no-container"),
    ],
)
def test_no_container(tmp_path: Path, path: str, text: str) -> None:
    put(tmp_path, path, text)
    assert read_host(tmp_path, NOWHERE).container is None


# System


@pytest.mark.parametrize(
    ("release", "wsl"),
    [("5.15.153.1-microsoft-standard-WSL2", True), ("4.4.0-19041-Microsoft", True), ("6.1.0-18-amd64", False)],
)
def test_wsl_by_its_kernel(tmp_path: Path, release: str, wsl: bool) -> None:
    put(tmp_path, "proc/sys/kernel/osrelease", release + "\n")
    host = read_host(tmp_path, NOWHERE)
    assert (host.kernel, host.wsl) == (release, wsl)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\nID=ubuntu\n', "Ubuntu 24.04.1 LTS"),
        ("PRETTY_NAME='Alpine Linux v3.20'", "Alpine Linux v3.20"),
        ("PRETTY_NAME=Plain\n", "Plain"),
        ('PRETTY_NAME=""\n', None),
        ('NOT_PRETTY_NAME="x"\n', None),
        ("", None),
    ],
)
def test_the_name_of_the_system(tmp_path: Path, text: str, name: str | None) -> None:
    put(tmp_path, "etc/os-release", text)
    assert read_host(tmp_path, NOWHERE).os_name == name


def test_os_release_has_a_second_place(tmp_path: Path) -> None:
    put(tmp_path, "usr/lib/os-release", 'PRETTY_NAME="Vendor"\n')
    assert read_host(tmp_path, NOWHERE).os_name == "Vendor"
    put(tmp_path, "etc/os-release", 'PRETTY_NAME="Administrator"\n')
    assert read_host(tmp_path, NOWHERE).os_name == "Administrator"


def test_display_vendors(tmp_path: Path) -> None:
    devices = {"0": ("0x030000", "0x1002"), "1": ("0x030200", "0x10de"), "2": ("0x020000", "0x8086"), "3": ("x", "")}
    for slot, (kind, vendor) in devices.items():
        put(tmp_path, f"sys/bus/pci/devices/0000:00:0{slot}.0/class", kind + "\n")
        put(tmp_path, f"sys/bus/pci/devices/0000:00:0{slot}.0/vendor", vendor + "\n")
    put(tmp_path, "sys/bus/pci/devices/0000:00:09.0/class", "0x030000\n")  # and no vendor
    assert read_host(tmp_path, NOWHERE).display_vendors == frozenset({0x1002, 0x10DE})


def test_no_display_is_not_unknown(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    assert read_host(tmp_path, NOWHERE).display_vendors == frozenset()


@given(st.text(max_size=200))
def test_any_text_is_parsed(text: str) -> None:
    assert parse_memory_limit(text) is None or parse_memory_limit(text)


@given(st.binary(max_size=100))
def test_any_bytes_in_the_files(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    root = tmp_path_factory.mktemp("root")
    for path in (
        "etc/os-release",
        "proc/meminfo",
        "proc/self/cgroup",
        "proc/1/environ",
        "proc/sys/kernel/osrelease",
        "sys/fs/cgroup/memory.max",
        "sys/bus/pci/devices/0/class",
        "sys/bus/pci/devices/0/vendor",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    host = read_host(root, NOWHERE)
    assert host.memory_total is None or host.memory_total > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the list of open files is Linux's here")
def test_open_files_are_those_of_the_process() -> None:
    def is_open(number: int) -> bool:
        try:
            os.fstat(number)
        except OSError:
            return False
        return True

    def agrees() -> bool:
        files = _read_open_files()
        assert files is not None
        return files.used == sum(map(is_open, range(min(files.limit, 4096))))

    assert any(agrees() for _ in range(100)), "another thread may open a file in between, but not always the same"
