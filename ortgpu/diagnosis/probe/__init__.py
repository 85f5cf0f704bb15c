"""What has to be tried is tried in a child process: its start, its program, its report, its judgement."""
