"""GPUSessionPool: sessions on several GPUs in one process."""
