"""For programs about something else than the search for a GPU: here, sessions find at once that there is none.

The search loads the provider and CUDA's libraries, which is half of what a program with a session on the CPU takes.
"""

from ortgpu.errors import DriverNotFoundError
from ortgpu.session import opening


def find_no_gpu(*_):
    raise DriverNotFoundError("no GPU is searched here")


opening.find_gpu = find_no_gpu
