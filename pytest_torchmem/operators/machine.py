"""The machine that a trace stands for: a host, and with fake cuda a GPU beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calibration_key import RESERVES, question_of
from pytest_torchmem.operators.cpu_bodies import find_body
from pytest_torchmem.operators.custom_operators import taught
from pytest_torchmem.operators.families import load
from pytest_torchmem.operators.meta_functions import CPU_META_FUNCTIONS, META_FUNCTIONS
from pytest_torchmem.operators.operator import Operator
from pytest_torchmem.operators.workspace import (
    Buffer,
    Workspace,
    as_workspace,
    find_workspace,
    takes_nothing,
    unknown,
)
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.targets.calibration import Calibration, Figure, Question
from pytest_torchmem.targets.device_index import invalid_device_index
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.kernels import run_composite_explicit
from pytest_torchmem.torch_private.operators import OpOverload
from pytest_torchmem.torch_private.version import TORCH_SERIES

#: The tensor arguments that decide the shape of an operator's outputs by their values; where an
#: operator is not named, all of them do.
_DECIDING = {
    "aten::masked_select": (1,),
    "aten::masked_scatter": (1,),
    "aten::_pack_padded_sequence": (1,),
}
#: Outputs that stay on the host, and whose values follow from the deciding arguments alone.
_HOST_OUTPUTS = {"aten::_pack_padded_sequence": (1,)}

#: Operators that torch has a kernel of for the CPU and none for CUDA, without those that only the
#: CPU's libraries and quantized tensors have (as a build with CUDA says of each,
#: ``_dispatch_has_kernel_for_dispatch_key``).
_NOT_ON_CUDA = frozenset(
    {
        "aten::_histogramdd_bin_edges",
        "aten::_histogramdd_from_bin_cts",
        "aten::_histogramdd_from_bin_tensors",
        "aten::_spdiags",
        "aten::histogram.bin_ct",
        "aten::histogram.bins_tensor",
        "aten::slow_conv3d_forward",
    }
)


@dataclass(slots=True)
class Machine:
    """A host and perhaps a GPU: where kernels are chosen and what they take."""

    host: Host
    gpu: Gpu | None = None
    kernels: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Composite operators that take another path on the GPU, by name."""
    leaves: frozenset[str] = frozenset()
    """Composite operators that are one kernel on the GPU."""
    meta_functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Geometry of outputs where it is another on the GPU than on ``meta``, by operator."""
    storages: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Outputs on the storages that the GPU's kernel leaves them on, by operator."""
    calibration: Calibration | None = None
    """What was measured of the GPU's kernels."""

    @property
    def device(self) -> torch.device:
        """The device that a trace reports on."""
        return torch.device("cuda", 0) if self.gpu else torch.device("cpu")

    def normalise(self, device: torch.device) -> torch.device:
        """Return ``device`` with the index it has when none is given."""
        if device.type == "cuda":
            if device.index:
                raise invalid_device_index(device)
            return device if device.index is not None else torch.device("cuda", 0)
        return torch.device(device.type)

    def is_leaf(self, name: str) -> bool:
        """Return whether a composite operator of the CPU is one kernel on this machine."""
        # CUDA has kernels for lists of tensors (ATen/native/cuda/ForeachBinaryOpList.cu, …), the
        # CPU a loop over them (ATen/native/ForeachOpsKernels.cpp).
        return self.gpu is not None and (
            name in self.leaves or name.startswith(("aten::_foreach_", "aten::_fused_"))
        )

    def body(self, operator: Operator, device: str) -> Callable[..., Any] | None:
        """Return what runs an operator as the sequence of others that it is; None for a leaf."""
        if not self.is_taught(operator.overload):
            told = find_body(operator.name, device)
            if told is not None:
                return partial(told, self.host)
        if operator.composite and not self.is_leaf(operator.name):
            return partial(run_composite_explicit, operator.overload)
        return None

    def is_taught(self, overload: OpOverload) -> bool:
        """Return whether users described an operator for this machine."""
        return taught(overload, self.device.type) is not None

    def meta_function(self, operator: Operator, device: str) -> Callable[..., Any] | None:
        """Return the user's or the profiler's function for the geometry of outputs."""
        model = taught(operator.overload, device)
        if model is not None and model.meta is not None:
            return model.meta
        load()
        name = operator.name
        if device == "cuda" and name in _NOT_ON_CUDA:
            raise NotImplementedError(
                f"Could not run '{name}' with arguments from the 'CUDA' backend: torch has no "
                "kernel of it for CUDA"
            )
        base = name.partition(".")[0]
        own = self.meta_functions if device == "cuda" else CPU_META_FUNCTIONS
        for functions in (own, META_FUNCTIONS):
            found = functions.get(name) or functions.get(base)
            if found is not None:
                return found
        return None

    def as_made(self, operator: Operator, device: str, outputs: Any, args: tuple[Any, ...]) -> Any:
        """Return real outputs on storages as large as those that the kernel leaves them on."""
        function = self.storages.get(operator.name) if device == "cuda" else None
        return outputs if function is None else function(outputs, *args)

    def deciding_arguments(self, name: str, tensors: list[Tensor]) -> tuple[int, ...]:
        """Return the positions of the tensors whose values decide the outputs' shape."""
        return _DECIDING.get(name, tuple(range(len(tensors))))

    def host_outputs(self, name: str) -> tuple[int, ...]:
        """Return the positions of outputs that stay on the host and are known with the shapes."""
        return _HOST_OUTPUTS.get(name, ())

    def workspace(
        self,
        device: torch.device,
        operator: Operator,
        outputs: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Workspace | None:
        """Return what a kernel takes beyond its outputs; None where that is nothing."""
        found = self._workspace(device, operator, outputs, args, kwargs)
        gpu = self.gpu if device.type == "cuda" else None
        sure = found.confidence is Confidence.EXACT or found.is_nothing
        if gpu is not None and not sure:
            question = question_of(operator, args, kwargs)
            figure = self._measured(question)
            if figure is not None:
                requests = (figure.workspace,) if figure.workspace > 0 else ()
                found = Workspace(
                    requests, Confidence.CALIBRATED, found.kept, calibrated=(operator.name,)
                )
            found = replace(found, questions=(question,))
        return None if found.is_nothing else found

    def reserve(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, int | None] | None:
        """Return the position and the measured size of the output whose size a library decides.

        The size is None where it was not measured; the whole is None for every other operator.
        """
        position = RESERVES.get(operator.name)
        if position is None or self.gpu is None:
            return None
        figure = self._measured(question_of(operator, args, kwargs))
        return position, figure.reserve if figure is not None else None

    def kept(self, buffer: Buffer, operator: Operator) -> Workspace:
        """Return a workspace that stays and that ``operator`` makes, in the size measured if any.

        That is the operator's own output, whose size a library decides.
        """
        question = question_of(operator, (), {})
        figure = self._measured(question)
        if figure is None or figure.reserve is None:
            found = as_workspace(Workspace((), buffer.confidence, (buffer,)), operator.name)
            return replace(found, questions=(question,))
        measured = replace(buffer, nbytes=figure.reserve, confidence=Confidence.CALIBRATED)
        return Workspace(
            (),
            Confidence.CALIBRATED,
            (measured,),
            calibrated=(operator.name,),
            questions=(question,),
        )

    def _measured(self, question: Question) -> Figure | None:
        if self.calibration is None or self.gpu is None:
            return None
        found = self.calibration.find(question, self.gpu.name, TORCH_SERIES)
        return found[0] if found is not None else None

    def _workspace(
        self,
        device: torch.device,
        operator: Operator,
        outputs: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Workspace:
        model = taught(operator.overload, device.type)
        if model is not None and model.workspace is not None:
            function: Callable[..., Any] | None = model.workspace
        else:
            function = find_workspace(operator.name.partition(".")[0], device.type)
        if function is None:
            known = takes_nothing(operator.overload, device.type)
            return as_workspace(0 if known else unknown(), operator.name)
        machine = self.gpu if device.type == "cuda" else self.host
        if operator.mutated_names:  # ``out=`` is where the outputs are, not another argument
            kwargs = {
                name: value for name, value in kwargs.items() if name not in operator.mutated_names
            }
        return as_workspace(function(machine, outputs, *args, **kwargs), operator.name)
