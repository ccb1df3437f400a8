"""Products that ATen gives to oneDNN on the CPU: those in bfloat16; native/mkldnn/Matmul.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.libraries.onednn.problem import by_onednn
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.targets.host import Host

SMALLEST = 16 * 16 * 16
"""``mkldnn_gemm_min_size``: below it oneDNN is not asked."""

SCALE = 4
"""The factor of a product, where that is not 1, as a tensor of its own."""


def has_onednn_products(machine: Host, dtype: torch.dtype) -> bool:
    """Return whether products of that type may be oneDNN's; ``use_mkldnn_bf16_matmul``, and
    ``use_mkldnn_fp16_matmul`` where the processor computes in float16.
    """
    if machine.capability != "AVX512" or not machine.onednn:
        return False
    return dtype == torch.bfloat16 or (dtype == torch.float16 and machine.computes_in_float16)


def uses_onednn(machine: Host, dtype: torch.dtype, size: int) -> bool:
    """Return whether a product of so many multiplications is oneDNN's."""
    return size > SMALLEST and has_onednn_products(machine, dtype)


def as_read(operand: Tensor, copied: bool) -> Tensor:
    """Return the operand, or its contiguous copy; a contiguous one is taken without odd strides of
    dimensions of one element.
    """
    if not copied and not operand.is_contiguous():
        return operand
    return torch.empty(operand.shape, dtype=operand.dtype, device="meta")


def onednn_product(
    machine: Host, first: Tensor, second: Tensor, taken: int, batch: int = 1
) -> int | Workspace:
    """Return ``taken`` and oneDNN's scratchpad for matrices in the layout they have, gaps between
    rows included.

    A row of its own counts as transposed (``matmul_helper_t::transA``), and is copied only where
    its elements are apart.
    """
    from pytest_torchmem.operators.libraries.onednn.brgemm_matmul import Product

    rows, depth = first.shape[-2:]
    columns = second.shape[-1]
    across = 1 if rows == depth == 1 else first.stride(-1)
    product = Product(
        host=machine,
        batch=batch,
        rows=rows,
        depth=depth,
        columns=columns,
        transposed=bool(rows == 1 or across != 1),
        turned=bool(across != 1),
        dense=not (_has_gaps(first) or _has_gaps(second)),
        across=bool(across != 1 if columns == 1 else second.stride(-1) == 1),
    )
    return by_onednn(machine, first.dtype, taken + product.scratchpad())


def _has_gaps(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    if 1 in (rows, columns):
        return bool(max(rows, columns) > 1 and (down if columns == 1 else across) != 1)
    return (down, across) not in ((columns, 1), (1, rows))
