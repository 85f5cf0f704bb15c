"""A model behind Ray Serve: a replica on every GPU, requests joined into batches.

    python examples/ray_serve.py [--allow-cpu]

Needs `pip install '.[ray]'` in a clone of ortgpu.

Exit code 0: it answered, on the GPUs or, with --allow-cpu, on CPUs. 1: no GPU
can be used. Ray starts on this machine, or is the cluster that RAY_ADDRESS names.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.parser
import ray
from ray import serve

from ortgpu import GPUError
from ortgpu.integrations.ray import GPUDeployment, probe

RELU = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


def main(allow_cpu: bool) -> int:
    model = onnx.parser.parse_model(RELU).SerializeToString()
    ray.init(include_dashboard=False, log_to_driver=False)
    num_gpus = 0 if allow_cpu else 1
    deployment = GPUDeployment.options(
        num_replicas=max(1, int(ray.cluster_resources().get("GPU", 0))), ray_actor_options={"num_gpus": num_gpus}
    )
    try:
        # Serve only logs why a replica does not start; this raises it.
        print("a worker runs on", probe(model, num_gpus=num_gpus, allow_cpu=allow_cpu, timeout=10))
        handle = serve.run(deployment.bind(model, allow_cpu=allow_cpu, max_batch_size=16), route_prefix=None)
        answers = [handle.remote({"x": np.array([[-1, 0, 1, 2]], np.float32) * number}) for number in range(1, 41)]
        for answer in answers[:3]:
            print(answer.result()["y"][0].tolist())
    except GPUError as error:  # also an error of a replica while it answers
        print(f"No GPU can be used ({error.code}): {error.summary}")
        return 1
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main("--allow-cpu" in sys.argv[1:]))
