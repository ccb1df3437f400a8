"""The peak of a training run beside the peak of its traced step."""

import warnings
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.measurement.device import cuda_device
from pytest_torchmem.measurement.measured import measure
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.targets.gpus import known_gpu
from pytest_torchmem.torch_private.kernels import tree_map_only
from pytest_torchmem.tracing.trace import trace
from pytest_torchmem.units import format_size

TRACED, REAL = "memory/traced_peak", "memory/real_peak"
_STEPS = 2
"""The states of an optimizer are there from the second step on."""


class RunPeaks:
    """Keeps the largest batch of a run on the host, and traces its step when the run is over."""

    def __init__(self) -> None:
        self._batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._elements = -1

    def begin(self) -> None:
        """Begin a run; torch counts its peak for the CUDA device of the process."""
        self._batch, self._elements = None, -1
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def see(self, *args: Any, **kwargs: Any) -> None:
        """Keep the arguments of a step, if they are the largest so far."""
        elements = sum(tensor.numel() for tensor in tensors_in((args, kwargs)))
        if elements > self._elements:
            self._elements = elements
            self._batch = tree_map_only(torch.Tensor, _on_host, (args, kwargs))

    def compare(self, loss: nn.Module, optimizer: Any) -> dict[str, int]:
        """Return the traced and the real peak; {} with a warning if the step cannot be traced.

        ``loss`` computes it from the arguments of a step. On cuda the real peak is that of the run
        since ``begin``. Nothing counts the memory of a run on the CPU, so the step runs there once
        more and is measured.
        """
        if self._batch is None:
            return {}
        args, kwargs = self._batch
        kwargs = kwargs | {
            "optimizer": _anew(optimizer),
            "steps": _STEPS,
            "loss_fn": lambda loss: loss,
        }
        try:
            if next(loss.parameters()).device.type == "cuda":
                real, gpu = torch.cuda.max_memory_allocated(), cuda_device().gpu()
                kwargs |= {"device": "cuda", "gpu": gpu.name, "memory": "unlimited"}
                with known_gpu(gpu):
                    traced = trace(loss, *args, **kwargs).allocated_peak or 0
            else:
                real = measure(loss, *args, **kwargs).peak
                traced = trace(loss, *args, host="here", **kwargs).peak
        except Exception as error:  # at the end of a run that succeeded
            warnings.warn(f"torchmem: the step of this run was not traced: {error}", stacklevel=3)
            return {}
        return {TRACED: traced, REAL: real}


def sentence(figures: Mapping[str, int]) -> str:
    traced, real = figures[TRACED], figures[REAL]
    difference = f"{(traced - real) / real:+.1%}" if real else "nothing was counted"
    return (
        f"memory: traced peak {format_size(traced)}, real peak {format_size(real)} ({difference})"
    )


def loss_of(output: Any) -> torch.Tensor:
    found = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(found, torch.Tensor):
        raise UsageError("the model returned no loss")
    return found


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _anew(optimizer: Any) -> Callable[..., Any] | None:
    """Return what makes another optimizer of the same kind."""
    own = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    if own is None:
        return None
    known = signature(type(own)).parameters
    defaults = {name: value for name, value in own.defaults.items() if name in known}
    return lambda parameters: type(own)(parameters, **defaults)
