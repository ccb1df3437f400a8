"""Activations and their gradients; native/Activation.cpp, native/GatedLinearUnit.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import like_first, like_operands
from pytest_torchmem.operators.formats import CONTIGUOUS, copied, made_like
from pytest_torchmem.operators.geometry import contiguous_copy, lying_alike
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import Host

operator("aten::hardswish_backward", "aten::mish_backward").meta()(like_operands)

log_sigmoid = operator("aten::log_sigmoid_forward")
log_sigmoid.workspace("cpu")(copied(self=CONTIGUOUS))
log_sigmoid_backward = operator("aten::log_sigmoid_backward")
log_sigmoid_backward.workspace("cpu")(copied(self=CONTIGUOUS))

operator("aten::glu_backward").meta()(made_like(self=CONTIGUOUS))  # glu_backward_cpu
operator("aten::glu_backward_jvp").meta()(made_like(grad_x=CONTIGUOUS))
operator("aten::glu_jvp").meta()(like_first)


@log_sigmoid.meta("cuda")
def without_buffer(input: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer is the CPU's only; native/cuda/ActivationLogSigmoidKernel.cu."""
    return lying_alike(input), input.new_empty((0,))


@log_sigmoid_backward.values()
def log_sigmoid_gradient(grad_output: Tensor, input: Tensor, buffer: Tensor) -> Tensor:
    """With the buffer that the CPU's kernel would have kept (vec_log_sigmoid)."""
    if not buffer.numel():
        buffer = input.abs().neg().exp()
    found: Tensor = torch.ops.aten.log_sigmoid_backward.default(grad_output, input, buffer)
    return found


@operator("aten::gelu_backward").workspace("cpu")
def gelu_backward(
    machine: Host, grad_output: Tensor, input: Tensor, *, approximate: str = "none"
) -> int:
    """A gradient that does not lie as the input does is reordered by oneDNN.

    gelu_backward_out_cpu and use_mkldnn; ideep's eltwise_backward.
    """
    onednn = machine.onednn and approximate == "none" and input.is_contiguous()
    halves = input.dtype == torch.bfloat16 and machine.computes_in_bfloat16
    if not onednn or input.numel() <= 1 or not (halves or input.dtype == torch.float32):
        return 0
    return contiguous_copy(grad_output)
