"""Try what has to be tried in a child process: its start, its program, its report, its judgement."""
