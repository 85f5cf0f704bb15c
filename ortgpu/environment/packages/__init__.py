"""Facts about installed packages, the interpreter and the programs that install."""
