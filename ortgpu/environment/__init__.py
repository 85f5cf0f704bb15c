"""Facts about this machine, this process and the installed packages.

Probes read and never judge. They return frozen dataclasses in which None means unknown, raise nothing for absence or
damage, initialise no CUDA and import none of the packages they look at. Each call reads again.

A session needs few of them when all is well, so each probe is a module of its own and none is imported here.
"""
