import signal

from ortgpu import testing
from ortgpu.errors import NoDeviceError


def find_gpus():
    timer = signal.getitimer(signal.ITIMER_REAL)[0]
    return testing.FoundGPUs((), NoDeviceError("a test is timed" if timer else "no test is timed"))


testing.find_gpus = find_gpus
