"""torchvision: what its kernels take for boxes, regions and deformable convolutions.

They are in torchvision/csrc/ops, for the CPU and for CUDA in files of the same names, and ask for
the same tensors but for ``nms``.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from pytest_torchmem.operators import indexing, sorting
from pytest_torchmem.operators.registry import Operators, operator
from pytest_torchmem.operators.workspace import (
    LONG,
    Workspace,
    bounded,
    contiguous_copy,
    dense_bytes,
)
from pytest_torchmem.targets.gpus import Gpu

_BITS = 64
"""Boxes for which a thread of CUDA notes in one number which it overlaps, ``threadsPerBlock``."""
_MOST_IMAGES = 32
"""Images that are taken apart at once, ``kMaxParallelImgs``."""


def describe() -> None:
    """Make records of the operators that allocate, in every version of the package."""
    nms = operator("torchvision::nms", source="torchvision/csrc/ops", data_dependent=True)
    # A position for each box, of which none overlaps another.
    nms.at_most()(lambda dets: dets.new_empty((dets.shape[0],), dtype=torch.int64))
    nms.workspace("cpu")(_boxes_on_cpu)
    nms.storages("cpu")(_kept_on_cpu)
    nms.workspace("cuda")(_boxes_on_cuda)
    _operators("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool").workspace()(_regions)
    # Dense copies of the regions, and of a gradient that is not read by its strides.
    _operators("_roi_align_backward", "_roi_pool_backward").workspace()(
        lambda grad, rois: contiguous_copy(rois) if grad.numel() else 0
    )
    _operators("_ps_roi_align_backward", "_ps_roi_pool_backward").workspace()(
        lambda grad, rois: contiguous_copy(grad) + contiguous_copy(rois) if grad.numel() else 0
    )
    _operators("deform_conv2d").decomposition()(_deform)
    _operators("_deform_conv2d_backward").decomposition()(_deform_backward)


def _operators(*names: str) -> Operators:
    return operator(*(f"torchvision::{name}" for name in names), source="torchvision/csrc/ops")


def _boxes_on_cpu(dets: Tensor, scores: Tensor) -> tuple[int, ...]:
    """Corners, areas and order, while scores are sorted or then what is suppressed.
    cpu/nms_kernel.cpp, nms_kernel_impl; the positions that are kept are made after the sort.
    """
    boxes, element = dets.shape[0], dets.element_size()
    if not boxes:
        return ()
    corners = [contiguous_copy(dets.select(1, at)) for at in range(4)]
    sort = boxes * element + sorting.row_of_keys(scores, 0) - boxes * LONG
    return (*corners, boxes * element, boxes * LONG, max(sort, boxes))


def _kept_on_cpu(outputs: Tensor, dets: Tensor) -> Tensor:
    """The first of as many positions as there are boxes; cpu/nms_kernel.cpp, nms_kernel_impl."""
    whole = outputs.new_empty((max(dets.shape[0], outputs.numel()),))
    whole[: outputs.numel()].copy_(outputs)
    return whole[: outputs.numel()]


def _boxes_on_cuda(machine: Gpu, outputs: Tensor, dets: Tensor) -> Workspace | int:
    """Order, sorted boxes, which of them overlap, which are kept, and their selection; a limit;
    cuda/nms_kernel.cu, nms_kernel.
    """
    boxes = dets.shape[0]
    if not boxes:
        return 0
    overlaps = boxes * -(-boxes // _BITS) * LONG
    keep = torch.empty((boxes,), dtype=torch.bool, device="meta")
    selection = indexing.positions_of(machine, [keep], outputs.numel())
    return bounded(boxes * LONG, dense_bytes(dets), overlaps, boxes, *selection)


def _regions(input: Tensor, rois: Tensor, pooled_height: int, pooled_width: int) -> int:
    """Dense copies; roi_align_kernel, roi_pool_kernel, ps_roi_align_kernel, ps_roi_pool_kernel."""
    if not (rois.shape[0] and input.shape[1] and pooled_height and pooled_width):
        return 0
    return contiguous_copy(input) + contiguous_copy(rois)


def _at_once(images: int) -> int:
    """Return how many images are taken apart at once: ``get_greatest_divisor_below_bound``."""
    most = min(images, _MOST_IMAGES)
    return next((number for number in range(most, 1, -1) if images % number == 0), 1)


def _group_columns(columns: Tensor, images: int, groups: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the columns of each group, for each part of the images."""
    by_group = columns.view(groups, -1, columns.shape[-1])
    for part, group in product(range(images // _at_once(images)), range(groups)):
        yield part, group, by_group[group]


def _deform(
    input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, groups: int
) -> Tensor:
    """Columns of some images at a time, their products, and those in the images' order;
    deform_conv2d_kernel, deform_conv2d_forward_kernel.
    """
    dense = [one.contiguous() for one in (input, offset, weight, mask, bias)]
    images, height, width = input.shape[0], *offset.shape[2:]
    filters, together = weight.shape[0], _at_once(input.shape[0])
    out = input.new_zeros((images, filters, height, width))
    if not images:
        return out
    parts = images // together
    buffer = input.new_zeros((parts, groups, filters // groups, together * height * width))
    columns = input.new_zeros(_rows_and_places(dense[0], weight, offset))
    for part, group, of_group in _group_columns(columns, images, groups):
        flat = dense[2].view(groups, filters // groups, -1)[group]
        buffer[part, group].addmm_(flat, of_group)
    in_order = buffer.view(parts, filters, together, height, width).transpose(1, 2)
    out.view(parts, together, filters, height, width).copy_(in_order)
    return out + dense[4].view(1, -1, 1, 1)


def _rows_and_places(input: Tensor, weight: Tensor, offset: Tensor) -> tuple[int, int]:
    """Return the shape of the columns of the images that are taken apart at once."""
    rows = input.shape[1] * weight.shape[2] * weight.shape[3]
    return rows, _at_once(input.shape[0]) * offset.shape[2] * offset.shape[3]


def _deform_backward(
    tensors: list[Tensor], groups: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Columns twice: for the gradients of input, offset and mask, and for that of the weight;
    deform_conv2d_kernel, backward_gradient_inputs and backward_gradient_parameters.
    """
    grad, input, weight, offset, mask, bias = (one.contiguous() for one in tensors)
    images, filters, height, width = grad.shape
    gradients = [torch.zeros_like(one) for one in (input, offset, mask)]
    flat = weight.view(groups, filters // groups, -1)
    if images:
        together = _at_once(images)
        parts = images // together
        sizes = (parts, together, groups, filters // groups, height, width)
        by_part = grad.view(sizes).permute(0, 2, 3, 1, 4, 5)
        _columns_gradient(_rows_and_places(input, weight, offset), images, flat, by_part)
    of_weight = torch.zeros_like(weight)
    if images:
        columns = input.new_empty(_rows_and_places(input, weight, offset))
        _gradient_of_weight(by_part.contiguous(), columns, of_weight.view(flat.shape))
        del columns, by_part
    of_bias = torch.ones_like(bias) * grad.sum((0, 2, 3))
    of_input, of_offset, of_mask = gradients
    return of_input, of_weight, of_offset, of_mask, of_bias


def _columns_gradient(shape: tuple[int, int], images: int, weight: Tensor, by_part: Tensor) -> None:
    columns = by_part.new_empty(shape)
    for part, group, of_group in _group_columns(columns, images, len(weight)):
        of_group.addmm_(weight[group].transpose(0, 1), by_part[part][group].flatten(1))


def _gradient_of_weight(by_part: Tensor, columns: Tensor, of_weight: Tensor) -> None:
    images = by_part.shape[0] * by_part.shape[3]
    for part, group, of_group in _group_columns(columns, images, len(of_weight)):
        of_weight[group].addmm_(by_part[part][group].flatten(1), of_group.transpose(1, 0))
