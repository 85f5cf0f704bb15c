"""Readers of files: ELF, PE, RECORD, the memory map and the cache of the loader."""
