"""Flash attention on the CPU; native/cpu/FlashAttentionKernel.cpp.

Without the packed operands of machines with AMX. What threads other than the first take is seen by
no allocator's record, nor counted here.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import HALVES, accumulation_type, contiguous_copy
from pytest_torchmem.operators.libraries.onednn.problem import by_onednn
from pytest_torchmem.operators.matmul.onednn import SCALE, SMALLEST, has_onednn_products
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.targets.host import Host

_KEYS = 512
"""Keys and values that a thread takes at a time."""


_forward = operator("aten::_scaled_dot_product_flash_attention_for_cpu")
_backward = operator("aten::_scaled_dot_product_flash_attention_for_cpu_backward")


def _split(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows of queries and of keys that one thread works on; ``flash_attention`` picks by length."""
    rows = query.shape[-2]
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(block, rows), min(_KEYS, key.shape[-2])


def _is_reduced(tensor: Tensor) -> bool:
    return tensor.dtype in HALVES


@_forward.meta("cpu")
def outputs_with_sums(query: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Sums of exponentials in double where the query is, which ``meta`` does not know before torch
    2.13; native/transformers/attention.cpp, _scaled_dot_product_flash_attention_cpu.
    """
    overload: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result, logsumexp = overload(**arguments)
    return result, logsumexp.to(accumulation_type(query.dtype))


@_forward.workspace("cpu")
def flash_attention(machine: Host, query: Tensor, key: Tensor) -> int | Workspace:
    """Per thread: a block of scores, its row maxima and sums, and a block of the output.

    Operands that oneDNN has packed for AMX are not counted.
    """
    if query.numel() == 0 or key.numel() == 0:
        return 0
    rows, columns = _split(query, key)
    accumulated = accumulation_type(query.dtype).itemsize
    block = (rows * columns + 2 * rows + rows * query.shape[-1]) * accumulated
    if _is_reduced(query):
        block += rows * columns * query.element_size()
    taken = machine.threads * block
    packs = has_onednn_products(machine, query.dtype)
    return by_onednn(machine, query.dtype, taken) if packs else taken


@_backward.workspace("cpu")
def flash_attention_backward(
    machine: Host, grad_out: Tensor, query: Tensor, key: Tensor
) -> int | Workspace:
    """Per thread: blocks of scores and of their gradient; once: the sums of one block's rows.

    The gradient is copied unless it lies with the heads inside, as the output does.
    """
    if query.numel() == 0 or key.numel() == 0:
        return 0
    rows, columns = _split(query, key)
    accumulated = accumulation_type(query.dtype).itemsize
    blocks = 2 * rows * columns * accumulated
    if _is_reduced(query):
        blocks += 2 * rows * columns * query.element_size()
    copied = contiguous_copy(grad_out.transpose(1, 2))
    taken = copied + machine.threads * blocks + rows * accumulated
    if not has_onednn_products(machine, query.dtype):
        return taken
    products = max(_products(machine, query, key))
    return by_onednn(machine, query.dtype, taken + products)


def _products(machine: Host, query: Tensor, key: Tensor) -> list[int]:
    """Bytes that oneDNN takes for the products of each pair of blocks: the gradient of the value,
    and, multiplied by the scale, those of the query and of the key.

    A gradient of the value is of one that lies with the heads inside, so never without gaps.
    """
    from pytest_torchmem.operators.matmul.onednn import Product

    rows, columns = _split(query, key)
    width, keys = query.shape[-1], key.shape[-2]
    dense = bool(key.stride(-2) == width)
    sizes = {rows, query.shape[-2] % rows or rows}
    lengths = {columns, keys % columns or columns}
    found = [0]
    for queries, length in product(sizes, lengths):
        if queries * length * width <= SMALLEST:
            continue
        of_query = Product(machine, 1, queries, length, width, False, False, dense, True)
        of_key = Product(machine, 1, length, queries, width, True, True, False, True)
        found += [SCALE + of_query.scratchpad(), SCALE + of_key.scratchpad()]
    return found
