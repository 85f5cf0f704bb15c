"""The faults: every environment that is known to end on the CPU, what is said of it here, and what mends it.

One table of cases, in groups: :data:`CASES`. A case is data and one function that breaks an environment; the tests, the
advice runner and the command ``python -m tests.faults`` all go through it. What is no case here, and why: ``rows.py``.
"""

from tests.faults import (
    driver,
    driver_library,
    libraries,
    library_versions,
    loader,
    newer,
    package_files,
    package_places,
    packages,
    plugins,
    process,
    requests,
)
from tests.faults.case import OWN, Case, Code

GROUPS = {
    "A": "packages and the import",
    "B": "loading the CUDA libraries",
    "C": "driver, devices and hardware",
    "D": "what is asked of a session",
    "G": "the process and what surrounds it",
    "P": "CUDA as a plugin",
}

CASES: tuple[Case, ...] = (
    *packages.CASES,
    *package_files.CASES,
    *package_places.CASES,
    *libraries.CASES,
    *library_versions.CASES,
    *newer.CASES,
    *loader.CASES,
    *driver.CASES,
    *driver_library.CASES,
    *requests.CASES,
    *process.CASES,
    *plugins.CASES,
)

__all__ = ["CASES", "GROUPS", "OWN", "Case", "Code"]
