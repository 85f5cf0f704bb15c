"""The way by which CUDA reaches ONNX Runtime, chosen among those that are there, and what a child is told of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from ortgpu.environment.packages import plugins
from ortgpu.environment.packages.plugins import (
    CUDA,
    LIBRARY,
    Arrival,
    PluginPackage,
    Way,
    choose_arrival,
    environ_of_child,
)

FILE = "libonnxruntime_providers_cuda.so"
LOOSE: Final = "registered by the program"


class There:
    """A folder with a provider's file for each way of arrival, and a module that says what is registered."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugins, "_told", None)
        monkeypatch.delenv(LIBRARY, raising=False)
        self.monkeypatch = monkeypatch
        self.built_in, self.packaged, self.loose = (self.file(folder / name) for name in ("capi", "package", "loose"))
        self.package = PluginPackage("onnxruntime-ep-cuda13", "1.31.1", str(folder), None, self.packaged)
        self.registered()

    @staticmethod
    def file(folder: Path) -> str:
        folder.mkdir()
        (folder / FILE).touch()
        return str(folder / FILE)

    def registered(self, *paths: str) -> None:
        """As ONNX Runtime lists them: the CPU first, whose device names no library."""
        of_cpu = SimpleNamespace(ep_name="CPUExecutionProvider", ep_metadata={"version": "1.31.1"})
        devices = [SimpleNamespace(ep_name=CUDA, ep_metadata={"library_path": path}) for path in paths]
        module = SimpleNamespace(get_ep_devices=lambda: [of_cpu, *devices], get_build_info=lambda: "ORT Build Info: ")
        self.monkeypatch.setitem(sys.modules, "onnxruntime", module)

    def arrival(self, *, built_in: bool = False, packaged: bool = False) -> Arrival | None:
        packages = [self.package] if packaged else []
        return choose_arrival(self.built_in if built_in else None, None, packages, in_process=True)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> There:
    return There(tmp_path, monkeypatch)


def test_what_the_program_registered_comes_first(there: There) -> None:
    there.registered(there.loose)
    found = there.arrival(built_in=True, packaged=True)
    assert found == Arrival(LOOSE, there.loose)
    assert str(found) == "plugin registered by the program"


def test_a_registered_file_of_a_package_is_that_package(there: There, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "package")
    path = str(tmp_path / "link" / FILE)
    there.registered(path)
    found = there.arrival(packaged=True)
    assert found == Arrival("plugin package", path, there.package), "under the name by which it is registered"
    assert str(found) == "plugin package: onnxruntime-ep-cuda13 1.31.1"


@pytest.mark.parametrize(("build", "way"), [(", cuda-plugin-ep=1", "bundled plugin"), ("", LOOSE)])
def test_a_registered_file_of_onnx_runtime_is_bundled_if_the_build_says_so(there: There, build: str, way: Way) -> None:
    there.registered(there.built_in)
    there.monkeypatch.setattr(sys.modules["onnxruntime"], "get_build_info", lambda: f"ORT Build Info: {build}")
    assert there.arrival(built_in=True, packaged=True) == Arrival(way, there.built_in)


@pytest.mark.parametrize("by_variable", [True, False])
def test_what_another_process_had_registered_comes_last(there: There, by_variable: bool) -> None:
    if by_variable:
        there.monkeypatch.setenv(LIBRARY, there.loose)
    else:
        plugins.tell(there.loose)
    ways = [there.arrival(built_in=True), there.arrival(packaged=True), there.arrival()]
    assert [each.way if each else None for each in ways] == ["built in", "plugin package", LOOSE]
    assert choose_arrival(None, None, (), in_process=False) is None
    os.remove(there.loose)
    assert there.arrival() is None


def test_only_a_child_is_told(there: There) -> None:
    untouched = dict(os.environ)
    before = {**untouched, "ORT_DISABLE_TELEMETRY": "1"}
    assert environ_of_child() == before
    there.registered(there.loose)
    assert environ_of_child() == {**before, LIBRARY: there.loose}
    assert os.environ == untouched
