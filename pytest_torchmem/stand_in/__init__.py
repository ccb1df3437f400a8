"""A stand-in for the CUDA runtime: torch's own CUDA host code and allocator run without a GPU.

The C sources answer what a CUDA build of torch asks of ``libcudart`` and of CUDA's libraries, for
one GPU of the catalogue: memory is a mapping that costs nothing, copies copy, kernels do nothing.
They are compiled at first use and preloaded by ``torchmem stand-in``. No library of NVIDIA's is
loaded beside them, no check of authenticity is met or answered (docs/measuring.md).
"""
