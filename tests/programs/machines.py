"""What programs on a machine of the laboratory share: see Machine.run_program in tests/lab/child.py."""

from tests.support import children


def report(value):
    children.report("json", value)
