"""Wheels that the test environment does not have, downloaded once for each interpreter and kept."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from tests.lab.installed import GPU_DISTRIBUTION
from tests.lab.overlay import LabError


class Wheels:
    """A folder of wheels, filled by pip when one is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / str(sys.implementation.cache_tag)
        self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, distribution: str, version: str) -> Path:
        """The wheel of one version for this interpreter."""
        pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
        kept = sorted(self.folder.glob(pattern))
        if kept:
            return kept[0]
        with tempfile.TemporaryDirectory(dir=self.folder) as partial:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--dest", partial, f"{distribution}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            found = sorted(Path(partial).glob(pattern))
            if done.returncode or not found:
                raise LabError(f"{' '.join(command)} brought no wheel:\n{done.stdout}{done.stderr}")
            return found[0].replace(self.folder / found[0].name)  # whole or not at all: others may be doing the same

    @property
    def cpu_twin(self) -> Path:
        """``onnxruntime``, the CPU build, of the same version as the GPU build that is installed."""
        return self.get("onnxruntime", metadata.version(GPU_DISTRIBUTION))
