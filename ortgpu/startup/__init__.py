"""The folder that `ortgpu exec` puts on PYTHONPATH: nothing but ``sitecustomize`` is importable from it."""
