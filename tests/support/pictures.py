"""The pictures of the guide: what `ortgpu doctor` and `ortgpu check` show in a terminal of 80 columns, as it is here.

python -m tests.support.pictures [FOLDER]
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

import onnx.parser
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from tests.support.children import ROOT
from tests.support.command_line import shown_in_a_terminal

PICTURES = {"doctor": ["doctor"], "check": ["check", "--allow-cpu", "model.onnx"]}
MODEL = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""
# Fonts from the network are left out: any fixed one will do.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
_COLUMNS = 80


def write_pictures(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        Path(work, "model.onnx").write_bytes(onnx.parser.parse_model(MODEL).SerializeToString())
        for name, command in PICTURES.items():
            shown = shown_in_a_terminal(*command, columns=_COLUMNS, cwd=work).replace(sys.prefix, "/srv/venv").rstrip()
            console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
            console.print(Text.from_ansi(f"$ ortgpu {' '.join(command)}\n{shown}"))
            svg = console.export_svg(title=f"ortgpu {name}", code_format=_FORMAT, unique_id=f"ortgpu-{name}")
            text = "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
            (folder / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "examples")
