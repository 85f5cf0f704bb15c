"""Features that ONNX Runtime's pages on distributed training promise, and that no published package has."""

from __future__ import annotations

from typing import Final, Literal

from ...errors import Severity, TrainingUnavailableError, manual

LAST_RELEASE: Final = "1.19.2"  # of onnxruntime-training and onnxruntime-training-cpu, September 2024

Missing = Literal["nccl", "horovod", "cuda", "checkpoint shards", "model parallelism"]


# Summary, evidence, and what to do instead
_REFUSALS: Final[dict[Missing, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "nccl": (
        "no published package of ONNX Runtime, for training or inference, is built with NCCL or MPI",
        (
            "onnxruntime-training 1.13.1 to 1.19.2 were looked at: no NCCL symbol, no link to libnccl or libmpi",
            "their Python module carries the text 'ORT is not built with NCCL.'",
        ),
        (
            "train data-parallel with the means of MPI, as examples/train_data_parallel.py does",
            "or use torch with DistributedDataParallel, which has NCCL, and export the result to ONNX",
        ),
    ),
    "horovod": (
        "ONNX Runtime does not work with Horovod: it dropped that in 2020",
        (
            "microsoft/onnxruntime pull request 5468 of 2020: deprecating Horovod",
            "the newest Horovod is 0.28.1 of June 2023, published as sources only",
        ),
        ("train data-parallel with MPI, as examples/train_data_parallel.py does; Horovod goes on to serve torch",),
    ),
    "cuda": (
        "training with ONNX Runtime on a GPU is not verified, and not promised",
        (
            f"onnxruntime-training {LAST_RELEASE} is built for CUDA 11.8 and cuDNN 8, for Python 3.8 to 3.11",
            "it has kernels for compute capabilities 6.0 to 8.6; newer GPUs would compile them at the first use",
            "onnxruntime-training-cpu computes on the CPU, whatever GPU there is",
        ),
        (
            "train with torch on the GPU, export the result to ONNX and open it with GPUSession",
            "or train on the CPU with onnxruntime-training-cpu",
        ),
    ),
    "checkpoint shards": (
        "checkpoints of ORTTrainer (*.ort.pt) cannot be read by any package that still trains",
        (
            "ORTTrainer was deprecated with ONNX Runtime 1.13, in 2022",
            "onnxruntime.training.checkpoint is in the packages up to 1.16.3, and gone from 1.17 on",
        ),
        (
            "merge the shards with aggregate_checkpoints of onnxruntime-training 1.16.3, in an environment of its own",
            "and save what comes out as a CheckpointState, with ortgpu.distributed.checkpoint.save",
        ),
    ),
    "model parallelism": (
        "ONNX Runtime cannot train a model that does not fit into one GPU",
        ("no published package has pipeline or tensor parallelism: every rank holds the whole model",),
        (
            "use torch with FSDP or DeepSpeed, and export the result to ONNX",
            "or make it fit: smaller batches, fewer trained parameters (requires_grad of generate_artifacts)",
        ),
    ),
}


def refuse(missing: Missing, *, severity: Severity = "fatal") -> TrainingUnavailableError:
    """Return the error for a feature that does not exist."""
    summary, evidence, instead = _REFUSALS[missing]
    return TrainingUnavailableError(
        summary,
        evidence=evidence,
        fixes=map(manual, instead),
        severity=severity,
        reason=missing,
    )
