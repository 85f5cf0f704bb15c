"""The probe: attempts in a child process, from its start to the judgement of its report."""
