"""What ``torch.cuda.get_device_properties`` says of a GPU."""

from __future__ import annotations

from pytest_torchmem.targets.gpus import Gpu

#: Shared memory in KiB by compute capability: of a multiprocessor, and the most of it for a block
#: (CUDA C++ Programming Guide, technical specifications per compute capability).
_SHARED_MEMORY = {
    (7, 0): (96, 96),
    (7, 5): (64, 64),
    (8, 0): (164, 163),
    (8, 6): (100, 99),
    (8, 9): (100, 99),
    (9, 0): (228, 227),
    (10, 0): (228, 227),
    (10, 3): (228, 227),
    (12, 0): (100, 99),
}


class DeviceProperties:
    """What ``torch.cuda.get_device_properties`` returns."""

    def __init__(self, gpu: Gpu) -> None:
        self.name = gpu.product
        self.major, self.minor = gpu.capability
        self.total_memory = gpu.memory
        self.multi_processor_count = gpu.multiprocessors
        self.max_threads_per_multi_processor = gpu.threads_per_multiprocessor
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.is_integrated = self.is_multi_gpu_board = 0
        self.gcnArchName = gpu.product
        self.max_threads_per_block = 1024
        self.shared_memory_per_block = 48 * 1024
        if gpu.capability in _SHARED_MEMORY:
            multiprocessor, block = _SHARED_MEMORY[gpu.capability]
            self.shared_memory_per_multiprocessor = multiprocessor * 1024
            self.shared_memory_per_block_optin = block * 1024

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name={self.name!r}, major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 1024**2}MB, "
            f"multi_processor_count={self.multi_processor_count})"
        )
