"""cuDNN's attention, whose workspace cuDNN alone knows; native/cudnn/MHA.cpp."""

from __future__ import annotations

from torch import Tensor

from pytest_torchmem.operators.geometry import dense_bytes
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, unknown


@operator("aten::_scaled_dot_product_cudnn_attention", "aten::_cudnn_attention_forward").workspace(
    "cuda"
)
def cudnn_forward() -> Workspace:
    """``mha_graph->get_workspace_size()``, which cuDNN alone knows; native/cudnn/MHA.cpp."""
    return unknown()


@operator(
    "aten::_scaled_dot_product_cudnn_attention_backward",
    not_in_key=("philox_seed", "philox_offset"),
).workspace("cuda")
def cudnn_backward(grad_out: Tensor, out: Tensor) -> Workspace:
    """A copy of a gradient that lies otherwise than the output, and cuDNN's; MHA.cpp,
    ``run_cudnn_SDP_bprop``.
    """
    alike = grad_out.stride() == out.stride()
    return unknown(0 if alike else dense_bytes(grad_out))
