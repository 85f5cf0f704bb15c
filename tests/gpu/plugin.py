"""``python -m tests.gpu.plugin FOLDER CPU_WHEEL``: a folder in which CUDA is a plugin, for the same GPU tests again.

CPU_WHEEL is that of onnxruntime, of the release of the installed onnxruntime-gpu, whose provider becomes the package
onnxruntime-ep-cuda12 or -cuda13. Two ways, each with all CUDA libraries that this Python has beside it:

    PYTHONPATH=FOLDER:$PWD python -m tests.gpu RESULTS                        # a package
    PYTHONPATH=FOLDER/registered:FOLDER:$PWD python -m tests.gpu RESULTS      # every program registers it first
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import onnxruntime
import pytest

from tests.lab.fixtures import PLUGIN, PLUGIN_MODULE, provider_library
from tests.lab.installed import VERSION

#: Mark of a test of what a plugin of 1.31.1 on a core without CUDA does not do; the class GPUSession's errors say it.
built_in_only = pytest.mark.skipif(
    not onnxruntime.get_device().startswith("GPU"), reason="CUDA is a plugin here, of an ONNX Runtime without CUDA"
)

#: Mark of a test of the guard, which registers no plugin: the program does.
registered_only = pytest.mark.skipif(
    not (
        onnxruntime.get_device().startswith("GPU")
        or any(device.ep_name == "CUDAExecutionProvider" for device in onnxruntime.get_ep_devices())
    ),
    reason="CUDA is a plugin that this program has not registered",
)

#: Mark of a test of a process that has not imported ONNX Runtime and used CUDA when it starts.
not_at_start = pytest.mark.skipif(
    "ortgpu" in getattr(sys.modules.get("sitecustomize"), "__dict__", {}),
    reason="every process registers the plugin at its start here",
)

REGISTER = f"""
import ortgpu, onnxruntime, {PLUGIN} as plugin
ortgpu.preload()
onnxruntime.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
"""


def main(folder: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    library = provider_library()
    package = folder / PLUGIN
    package.mkdir()
    (package / library.name).symlink_to(library)
    (package / "__init__.py").write_text(PLUGIN_MODULE, encoding="utf-8")
    metadata = folder / f"{PLUGIN}-{VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {PLUGIN}\nVersion: {VERSION}\n", encoding="utf-8")
    (folder / "registered").mkdir()
    (folder / "registered" / "sitecustomize.py").write_text(REGISTER, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
