"""What the kernel of a call takes: from its record, and measured where a library decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_torchmem.operators.calibration_key import key_of
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.without_workspace import is_iterated, takes_nothing
from pytest_torchmem.operators.workspace import Buffer, Workspace, as_workspace, unknown
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.version import TORCH_SERIES

if TYPE_CHECKING:
    from pytest_torchmem.operators.libraries.cudnn import Cudnn
    from pytest_torchmem.targets.calibration import WorkspaceKey, WorkspaceSize


def workspace_of(
    target: Target,
    device: str,
    spec: OperatorSpec,
    outputs: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Workspace | None:
    """Return what a kernel takes beyond its outputs; None where that is nothing."""
    if device != "cuda":
        found = _computed(target, device, None, spec, outputs, args, kwargs)
        return None if found.is_nothing else found
    from pytest_torchmem.operators.libraries.cudnn import Cudnn

    figure = None
    if target.calibration is not None:  # what was measured comes before what a library tells
        figure = _measured(target, key_of(spec, args, kwargs))
    cudnn = Cudnn(target, silent=figure is not None)
    found = _computed(target, device, cudnn, spec, outputs, args, kwargs)
    if found.confidence is not Confidence.EXACT or cudnn.answers:
        key = key_of(spec, args, kwargs)
        if figure is not None:
            requests = (figure.workspace,) if figure.workspace > 0 else ()
            found = Workspace(requests, Confidence.CALIBRATED, found.kept, calibrated=(spec.name,))
        found = replace(found, questions=(key,), answers=tuple(dict.fromkeys(cudnn.answers)))
    return None if found.is_nothing else found


def _computed(
    target: Target,
    device: str,
    cudnn: Cudnn | None,
    spec: OperatorSpec,
    outputs: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Workspace:
    function = spec.on(device).workspace
    if function is None:
        return as_workspace(0 if _is_nothing(device, spec, args) else unknown(), spec.name)
    made = function(args, kwargs, machine=target.machine(device), outputs=outputs, cudnn=cudnn)
    return as_workspace(made, spec.name)


def _is_nothing(device: str, spec: OperatorSpec, args: Sequence[Any]) -> bool:
    """Return whether a kernel that has no function is known to take nothing for a call."""
    if not takes_nothing(spec.overload, device):
        return False
    if device != "cpu" or not is_iterated(spec.overload):
        return True
    return len({tensor.dtype for tensor in argument_tensors(args)}) <= 1


def library_output(
    target: Target, spec: OperatorSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, int | None] | None:
    """Return the position and the measured size of the output whose size a library decides.

    The size is None where it was not measured; the whole is None for every other operator.
    """
    position = spec.record.library_output
    if position is None or target.gpu is None:
        return None
    figure = _measured(target, key_of(spec, args, kwargs))
    return position, figure.reserve if figure is not None else None


def library_state(target: Target, buffer: Buffer, spec: OperatorSpec) -> Workspace:
    """Return a workspace that stays and that an operator makes, in the size measured if any.

    That is the operator's own output, whose size a library decides.
    """
    key = key_of(spec, (), {})
    figure = _measured(target, key)
    if figure is None or figure.reserve is None:
        found = as_workspace(Workspace((), buffer.confidence, (buffer,)), spec.name)
        return replace(found, questions=(key,))
    measured = replace(buffer, nbytes=figure.reserve, confidence=Confidence.CALIBRATED)
    return Workspace(
        (), Confidence.CALIBRATED, (measured,), calibrated=(spec.name,), questions=(key,)
    )


def _measured(target: Target, key: WorkspaceKey) -> WorkspaceSize | None:
    if target.calibration is None or target.gpu is None:
        return None
    found = target.calibration.find(key, target.gpu.name, TORCH_SERIES)
    return found[0] if found is not None else None
