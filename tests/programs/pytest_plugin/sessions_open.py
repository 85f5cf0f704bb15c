from ortgpu import testing

really = testing.find_gpus
testing.find_gpus = lambda: testing.FoundGPUs(really().gpus, None)
