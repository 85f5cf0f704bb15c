from ortgpu import testing
from ortgpu.errors import NoDeviceError

testing.find_gpus = lambda: testing.FoundGPUs((), NoDeviceError("CUDA shows no GPU"))
