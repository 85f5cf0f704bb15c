"""A batch inference with Ray Data: a model on every GPU of a cluster.

    python examples/ray_data.py [--allow-cpu]

Needs `pip install '.[ray]'` in a clone of ortgpu.

Exit code 0: the model ran, on the GPUs or, with --allow-cpu, on CPUs. 1: no GPU can
be used. Ray starts on this machine, or is the cluster that RAY_ADDRESS names.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.parser
import ray

from ortgpu import GPUError
from ortgpu.integrations.ray import RayGPUSession, probe

RELU = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


def main(allow_cpu: bool) -> int:
    model = onnx.parser.parse_model(RELU).SerializeToString()
    ray.init(include_dashboard=False, log_to_driver=False)
    num_gpus = 0 if allow_cpu else 1
    rows = [{"id": number, "x": np.array([-1, 0, 1, 2], np.float32) * number} for number in range(1, 101)]
    try:
        # Optional: it fails at once if the cluster has no GPU, and the dataset below would wait for one.
        print("a worker runs on", probe(model, num_gpus=num_gpus, allow_cpu=allow_cpu, timeout=10))
        results = ray.data.from_items(rows).map_batches(
            RayGPUSession,
            fn_constructor_args=(model,),
            fn_constructor_kwargs={"allow_cpu": allow_cpu},
            compute=ray.data.ActorPoolStrategy(size=max(1, int(ray.cluster_resources().get("GPU", 0)))),
            num_gpus=num_gpus,
            num_cpus=0,
            batch_size=32,
        )
        for row in results.sort("id").take(3):
            print(row["id"], row["y"].tolist())
    except GPUError as error:  # an actor's error arrives here with its type
        print(f"No GPU can be used ({error.code}): {error.summary}")
        return 1
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main("--allow-cpu" in sys.argv[1:]))
