import sys


def pytest_unconfigure():
    print("imported:", *sorted(name for name in sys.modules if name.startswith("ortgpu.")))
