"""Facts about this machine, this process and the installed packages.

Probes read and never judge. They return frozen dataclasses; None in a field means unknown. Probes raise nothing for
absence or damage, initialise no CUDA and import none of the packages they look at. Each call reads again.

A healthy session needs few probes, so each probe is a module of its own and none is imported here.
"""
