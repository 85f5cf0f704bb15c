"""``ortgpu bench``: measure a model on this machine."""

from .command import bench as bench
