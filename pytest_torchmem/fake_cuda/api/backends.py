"""``torch.backends`` and ``torch.version``: the libraries that a build with CUDA brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.operators.attention.choice import BACKENDS, may_use
from pytest_torchmem.operators.libraries.cublas import cublas_workspace, cublaslt_workspace
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.patching.patches import Replacements
from pytest_torchmem.torch_private.patching.replaceable import can_use_attention

CUDNN_VERSION = 91900
"""The cuDNN that comes with torch 2.13's CUDA wheels is 9.19 or newer."""

CUDA_VERSION = torch.version.cuda or "13.0"
"""What torch 2.13's CUDA wheels on PyPI are built with; a build with CUDA has its own."""

BUILT: dict[str, Callable[..., Any]] = {
    "is_built": lambda: True,
    "is_flash_attention_available": lambda: True,
}
"""What every build with CUDA has."""


def _is_acceptable(tensor: torch.Tensor) -> bool:
    return (
        torch.backends.cudnn.enabled
        and tensor.device.type == "cuda"
        and tensor.dtype in (torch.float16, torch.float32, torch.float64)
    )


CUDNN: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "version": lambda: CUDNN_VERSION,
    "is_acceptable": _is_acceptable,
}

#: ``cudnnRNNMode_t``, which a build without cuDNN does not have.
CUDNN_RNN = {"get_cudnn_mode": {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}.__getitem__}


def blas(gpu: Gpu) -> dict[str, Callable[..., Any]]:
    """Return the functions that give the workspaces of cuBLAS and cuBLASLt, by name."""
    return {
        "cublas_workspace_size": lambda size=None: (
            cublas_workspace(gpu) if size is None else _set_size("CUBLAS_WORKSPACE_CONFIG")
        ),
        "cublaslt_workspace_size": lambda size=None: (
            cublaslt_workspace(gpu) if size is None else _set_size("CUBLASLT_WORKSPACE_SIZE")
        ),
    }


def _set_size(variable: str) -> NoReturn:
    raise UsageError(
        "torch.backends.cuda: a traced program cannot set the size of a cuBLAS workspace. Set the "
        f"environment variable {variable}, which a trace reads"
    )


def attention(trace: TraceContext) -> Replacements:
    """Let ``torch.backends.cuda.can_use_flash_attention`` and its like answer for the GPU."""

    def can_use(original: Callable[..., bool], backend: int) -> Callable[..., bool]:
        return lambda params, debug=False: (
            original(params, debug) if trace.off() else may_use(trace.gpu, backend, params)
        )

    functions = [(can_use_attention[name], backend) for name, backend in BACKENDS.items()]
    return [asked.by(can_use(asked.original, backend)) for asked, backend in functions]
