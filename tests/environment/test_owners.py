"""Which distribution owns the folder that ``import onnxruntime`` takes, among several along the search path."""

from __future__ import annotations

import importlib.machinery
import os
import zipfile
from pathlib import Path

from tests.support.made_packages import BUILD_INFO, ENGINE, engine, install, names, read


def test_twins_in_one_folder_are_each_compared(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    cpu = dict(ENGINE)
    del cpu["onnxruntime/capi/libonnxruntime_providers_cuda.so"]
    cpu["onnxruntime/capi/build_and_package_info.py"] = BUILD_INFO.replace("-gpu", "")
    cpu["onnxruntime/capi/onnxruntime_pybind11_state.so"] = "another ELF"
    install(tmp_path, "onnxruntime", "1.30.0", cpu)  # the last writer wins
    found = engine(tmp_path)
    by_name = {one.name: one for one in found.owners}
    assert set(by_name) == {"onnxruntime", "onnxruntime-gpu"}
    assert by_name["onnxruntime"].altered_files == ()
    assert set(by_name["onnxruntime-gpu"].altered_files) == {
        "onnxruntime/capi/build_and_package_info.py",
        "onnxruntime/capi/onnxruntime_pybind11_state.so",
    }
    assert by_name["onnxruntime-gpu"].missing_files == ()
    assert found.build_name == "onnxruntime"


def test_one_twin_uninstalled_leaves_holes(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    (tmp_path / "onnxruntime" / "__init__.py").unlink()
    (tmp_path / "onnxruntime" / "capi" / "build_and_package_info.py").unlink()
    found = engine(tmp_path)
    assert (found.folder, found.importable) == (str(tmp_path / "onnxruntime"), False)
    assert found.owners[0].missing_files == ("onnxruntime/__init__.py", "onnxruntime/capi/build_and_package_info.py")


def test_a_leftover_folder_without_owner(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        (place / "onnxruntime" / "capi").mkdir(parents=True)
    found = engine(first, second)
    assert (found.folder, found.importable, found.owners) == (str(first / "onnxruntime"), False, ())


def test_the_first_on_the_path_wins_and_the_other_is_elsewhere(tmp_path: Path) -> None:
    user, system = tmp_path / "user", tmp_path / "system"
    install(user, "onnxruntime", "1.20.0", {"onnxruntime/__init__.py": ""})
    install(system, "onnxruntime_gpu", "1.31.1", ENGINE)
    found = engine(user, system)
    assert found.folder == str(user / "onnxruntime")
    assert (names(found.owners), names(found.elsewhere)) == (["onnxruntime"], ["onnxruntime-gpu"])
    found = engine(system, user)
    assert (names(found.owners), names(found.elsewhere)) == (["onnxruntime-gpu"], ["onnxruntime"])


def test_a_source_tree_in_front_has_no_owner(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "onnxruntime").mkdir(parents=True)
    (source / "onnxruntime" / "__init__.py").touch()
    install(site, "onnxruntime_gpu", "1.31.1", ENGINE)
    found = engine(source, site)
    assert (found.folder, found.owners) == (str(source / "onnxruntime"), ())
    assert names(found.elsewhere) == ["onnxruntime-gpu"]
    assert found.elsewhere[0].missing_files == ()  # complete where it lies


def test_a_bare_folder_in_front_does_not_hide_a_package(tmp_path: Path) -> None:
    bare, site = tmp_path / "bare", tmp_path / "site"
    (bare / "onnxruntime").mkdir(parents=True)
    install(site, "onnxruntime_gpu", "1.31.1", ENGINE)
    found = engine(bare, site)
    assert (found.folder, found.importable) == (str(site / "onnxruntime"), True)


def test_a_module_file_shadows_the_package(tmp_path: Path) -> None:
    scripts, site = tmp_path / "scripts", tmp_path / "site"
    scripts.mkdir()
    install(site, "onnxruntime_gpu", "1.31.1", ENGINE)
    (scripts / "onnxruntime.py").touch()
    assert engine(scripts, site).shadowed_by == str(scripts / "onnxruntime.py")
    assert engine(scripts, site).folder == str(site / "onnxruntime")
    assert engine(site, scripts).shadowed_by is None
    (site / "onnxruntime.py").touch()  # beside it, the package is taken
    assert engine(site, scripts).shadowed_by is None


def test_a_zip_archive_shadows_the_package(tmp_path: Path) -> None:
    archive, site = tmp_path / "app.pyz", tmp_path / "site"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("onnxruntime/__init__.py", "")
    install(site, "onnxruntime_gpu", "1.31.1", ENGINE)
    inside = str(archive / "onnxruntime" / "__init__.py")
    assert (engine(archive, site).folder, engine(archive, site).shadowed_by) == (str(site / "onnxruntime"), inside)
    assert engine(site, archive).shadowed_by is None
    assert (engine(archive).folder, engine(archive).shadowed_by) == (None, inside)


def test_where_import_really_goes(tmp_path: Path) -> None:
    """The walk is the import system's: compare it with a real import for every order of four kinds of places."""
    package, bare, module, empty = (tmp_path / name for name in ("package", "bare", "module", "empty"))
    for place in (package / "onnxruntime", bare / "onnxruntime", module, empty):
        place.mkdir(parents=True)
    (package / "onnxruntime" / "__init__.py").touch()
    (module / "onnxruntime.py").touch()
    for order in ([package, bare, module], [bare, package, module], [module, package], [bare, module], [empty, bare]):
        path = [str(place) for place in order]
        spec = importlib.machinery.PathFinder.find_spec("onnxruntime", path)
        assert spec is not None
        found = engine(*path)
        if spec.origin is None:
            assert (found.importable, found.shadowed_by) == (False, None)
            assert found.folder == next(iter(spec.submodule_search_locations or ()))
        elif spec.origin.endswith("onnxruntime.py"):
            assert found.shadowed_by == spec.origin
        else:
            assert (found.folder, found.importable) == (os.path.dirname(spec.origin), True)
            assert found.shadowed_by is None


def test_an_owner_under_a_name_of_its_own(tmp_path: Path) -> None:
    install(tmp_path, "acme_inference", "3.0", ENGINE)  # seen in RECORD only
    assert names(engine(tmp_path).owners) == ["acme-inference"]
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    (tmp_path / "acme_inference-3.0.dist-info" / "top_level.txt").write_text("onnxruntime\n")
    assert names(engine(tmp_path).owners) == ["acme-inference", "onnxruntime-gpu"]


def test_relatives_that_own_other_folders_are_no_owners(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    install(tmp_path, "onnxruntime_extensions", "0.14.0", {"onnxruntime_extensions/__init__.py": ""})
    install(tmp_path, "onnxruntime_genai", "0.9.0", {"onnxruntime_genai/__init__.py": ""}, record=None)
    found = read(tmp_path)
    assert names(found.onnxruntime.owners) == ["onnxruntime-gpu"]
    assert found.onnxruntime.elsewhere == ()
    assert names(found.others) == ["onnxruntime-extensions", "onnxruntime-genai"]


def test_one_place_by_two_names_is_one_place(tmp_path: Path) -> None:
    install(tmp_path / "lib", "onnxruntime_gpu", "1.31.1", ENGINE)
    (tmp_path / "lib64").symlink_to("lib")
    found = engine(tmp_path / "lib64", tmp_path / "lib", tmp_path / "lib")
    assert names(found.owners) == ["onnxruntime-gpu"]
    assert found.elsewhere == ()
