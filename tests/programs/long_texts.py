"""Read words of the loader that end in the middle and are very long: seconds, or as good as for ever."""

from dataclasses import replace

from ortgpu.cli.pasted import recognise
from ortgpu.diagnosis.checks import imports
from ortgpu.diagnosis.checks.libraries import older_c_library
from ortgpu.diagnosis.facts import Facts
from ortgpu.environment.libraries import loader_words
from tests.support.made_facts import HEALTHY

SIZE = 100_000  # letters


def import_failed(text: str) -> Facts:
    return replace(HEALTHY, observed=replace(HEALTHY.observed, import_error=text))


for part in ("libstdc", "lib.so", ".so", "/libstdc++", "numpy", "/", "[/", "a b/", "lib", "'", '"', "a.", "CUDA "):
    for beginning in ("", "lib", "GLIBCXX_1 ", "ImportError: ", "/", "libcublas.so failed to map segment "):
        text = beginning + part * (SIZE // len(part))
        loader_words.not_found_for(text)
        loader_words.blames_numpy(text)
        loader_words.refuses(text)
        older_c_library(text)
        imports.failed(import_failed(text))
        recognise(text)
