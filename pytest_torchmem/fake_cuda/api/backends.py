"""What a build with CUDA brings: ``torch.backends``, ``torch.version``, functions of ``torch._C``.

Builds without CUDA lack the last (torch/csrc/cuda/Module.cpp). ``_cuda_getDeviceCount`` is not
among them: torch takes a build that has it for one with CUDA.
"""

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api.session import SESSION
from pytest_torchmem.fake_cuda.api.streams import Stream, capture_of
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.operators.attention.choice import BACKENDS, may_use
from pytest_torchmem.operators.libraries.cublas import cublas_workspace, cublaslt_workspace
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.patches import Replacements, can_use_attention

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

    def taken_by(backend: int) -> Callable[..., bool]:
        return lambda params, debug=False: may_use(trace.gpu, backend, params)

    asked = can_use_attention
    return [asked[name].unless(trace.off, taken_by(one)) for name, one in BACKENDS.items()]


def bindings() -> dict[str, Callable[..., Any]]:
    """Return them by name, for the GPUs of the trace that is running."""
    cuda = torch.cuda
    return {
        "_accelerator_getDefaultGenerator": _default_generator,
        "_cuda_exchangeDevice": _select,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_getCurrentStream": lambda device: _triple(cuda.current_stream(device)),
        "_cuda_getDefaultStream": lambda device: _triple(cuda.default_stream(device)),
        "_cuda_getDevice": lambda: cuda.current_device(),
        "_cuda_isCurrentStreamCapturing": _is_capturing,
        "_cuda_maybeExchangeDevice": _select,
        "_cuda_setDevice": lambda device: cuda.set_device(device),
        "_cuda_setStream": _set_stream,
        "_cuda_synchronize": lambda: None,
    }


def _default_generator(device: int | None = None) -> torch.Generator:
    """What ``torch.accelerator.get_rng_state`` asks, and Inductor (torch/_inductor/ir.py)."""
    return torch.cuda.default_generators[torch.cuda.current_device() if device is None else device]


def _select(device: int) -> int:
    """Make a GPU the current one; return the one that was."""
    return SESSION.running.select(device)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    cast(Any, torch.cuda).set_stream(Stream(device_index, stream_id=stream_id))


def _triple(stream: Any) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _is_capturing() -> bool:
    stream = torch.cuda.current_stream()
    return capture_of(stream.device_index, stream.stream_id) is not None
