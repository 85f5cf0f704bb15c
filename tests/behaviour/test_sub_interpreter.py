"""In a sub-interpreter of Python, where mod_wsgi runs an application unless told otherwise."""

from __future__ import annotations

import sys

from tests.lab.fixtures import Lab

# The kind that mod_wsgi and uWSGI make (Py_NewInterpreter). From 3.12 on Python's own module makes another by default,
# in which extension modules such as these refuse to be imported.
PROGRAM = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
code = {code!r}
if {version!r} >= (3, 13):
    interpreters.exec(interpreters.create("legacy"), code)
else:
    interpreters.run_string(interpreters.create(isolated=False), code)
"""
INSIDE = """
try:
    import ortgpu
    ortgpu.GPUSession({model!r})
except ortgpu.BrokenPackageError as error:
    print(error, flush=True)
import os
os._exit(7)  # Python before 3.13 may crash when it ends with such interpreters
"""


def test_a_session_is_refused_instead_of_never_made(lab: Lab) -> None:
    """The import of ONNX Runtime's extension waits for ever there, and so did every request to such a server."""
    code = INSIDE.format(model=str(lab.models.relu))
    done = lab.machine().run(PROGRAM.format(code=code, version=sys.version_info[:2]), timeout=20)
    assert done.returncode == 7, done.output
    assert "sub-interpreter" in done.stdout
    assert "WSGIApplicationGroup %{GLOBAL}" in done.stdout
    assert "pip" not in done.stdout
