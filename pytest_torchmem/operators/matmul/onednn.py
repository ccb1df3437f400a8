"""Products that ATen gives to oneDNN on the CPU: those in bfloat16; native/mkldnn/Matmul.cpp.

oneDNN takes ``brg_matmul:avx512_core_bf16`` (src/cpu/x64/matmul/brgemm_matmul_utils.cpp).
Every thread repacks a block of the right matrix, sums a block of the result in float, and turns a
block of the left matrix where that is transposed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import FLOAT, ceil_div, round_up
from pytest_torchmem.operators.libraries.onednn.problem import booked, by_onednn
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


_SIZE = 2
_COLUMNS = 64
"""Columns of a block of the right matrix, ``get_default_n_block``."""

_ELEMENT = 640
"""Bytes of a thread's list of products, ``brgemm_batch_element_per_thr_sz``, of a block's depth."""


class Product(NamedTuple):
    """``batch`` products of matrices of ``rows`` by ``depth`` and ``depth`` by ``columns``.

    ``transposed`` where columns of the left matrices are dense, ``turned`` where they have to be
    copied for that.
    """

    host: Host
    batch: int
    rows: int
    depth: int
    columns: int
    transposed: bool
    turned: bool
    dense: bool
    """Without gaps between rows, or between columns."""
    across: bool
    """Of a matrix and a vector: whether the matrix is dense across what is summed."""

    def scratchpad(self) -> int:
        """Bytes of the scratchpad; ``init_aux_values``, ``init_scratchpad``."""
        if self.host.onednn >= (3, 13) and self.dense and 1 in (self.rows, self.columns):
            return self._vector_scratchpad()
        threads, depth = self.host.threads, self._depth_block()
        column_block = min(_COLUMNS, self.columns)
        copied = self.turned or self._prefers_copy()
        rows, chunk, on_depth = self._blocks(column_block, depth, copied)
        entries = [threads * _ELEMENT]
        if copied:
            entries.append(threads * _SIZE * rows * _padded_depth(depth))
        entries.append(threads * _SIZE * _COLUMNS * round_up(depth, 32))
        if on_depth > 1:
            entries.append(threads * FLOAT * self.columns * self.rows)
        else:
            parts = 1 if depth >= self.depth else chunk
            entries.append(threads * FLOAT * column_block * rows * parts)
        return booked(*entries)

    def _vector_scratchpad(self) -> int:
        """A matrix and a vector: nothing is repacked, and the sums are of a block of the result;
        ``is_gemv``, from 3.13 on.
        """
        threads, length = self.host.threads, max(self.rows, self.columns)
        standing = self._replace(rows=length, columns=1, transposed=False, turned=False)
        depth = min(self.depth, 16384)
        rows = standing._blocks(1, depth, False)[0]
        smallest = min(16 if threads > self.batch else 32, length)
        split = (  # is_gemv_k_split_needed
            self.across
            and self.batch == 1
            and length & (length - 1) == 0
            and length * self.depth * _SIZE > self.host.l2
            and ceil_div(length, smallest) <= 2 * threads
        )
        return booked(
            threads * _ELEMENT * ceil_div(self.depth, depth),
            threads * FLOAT * (length if split else rows),
        )

    def _depth_block(self) -> int:
        return min(self.depth, 1024 if self.depth > 1024 and not self.transposed else 512)

    def _prefers_copy(self) -> bool:
        """Rows whose length is a large power of two, of a tall matrix, are copied."""
        power = self.depth & (self.depth - 1) == 0
        return not self.turned and power and self.depth >= 4096 and self.rows >= 1024

    def _blocks(self, column_block: int, depth: int, copied: bool) -> tuple[int, int, int]:
        """Rows of a block, blocks of columns that are computed together, and threads that share
        the depth: those that keep the threads most evenly busy;
        ``compute_blocking_heuristic_avx512``.
        """
        largest = min(256, self.rows)
        smallest = min(32, self.rows)
        across = ceil_div(self.columns, column_block)
        most_across = min(16 if copied else 1, across)
        on_depth = 1
        if self.host.threads > self.batch * across:
            smallest = min(16, self.rows)
            power = self.depth & (self.depth - 1) == 0
            if self.batch == 1 and self.transposed and power and self.depth >= 2048:
                on_depth = min(self.host.threads, 4)
        best, least = (0, 0, 0), 1.0
        for parts in range(on_depth, 0, -1):
            found = False
            threads = self.host.threads // parts
            for chunk in range(most_across, 0, -1):
                columns = ceil_div(self.columns, column_block * chunk)
                for rows in range(largest, smallest - 1, -1):
                    work = self.batch * ceil_div(self.rows, rows) * columns
                    if work < threads * 3 and work % threads and on_depth == 1:
                        continue
                    imbalance = self._imbalance(rows, chunk, column_block, depth, parts)
                    if imbalance < least:
                        best, least, found = (rows, chunk, parts), imbalance, True
            if not found:
                imbalance = self._imbalance(smallest, 1, column_block, depth, parts)
                if imbalance < least:
                    best, least = (smallest, 1, parts), imbalance
        return best

    def _imbalance(self, rows: int, chunk: int, column_block: int, depth: int, parts: int) -> float:
        threads = self.host.threads // parts
        across = ceil_div(self.columns, column_block)
        work = ceil_div(self.rows, rows) * ceil_div(self.columns, column_block * chunk) * self.batch
        total = _uneven(work, threads)
        total += rows * ceil_div(self.rows, rows) % self.rows / self.rows
        total += (ceil_div(across, chunk) * chunk - across) / across
        total += (self.host.threads - threads * parts) / self.host.threads
        total += _uneven(self.depth, parts * depth)
        return total / 5


def _uneven(work: int, threads: int) -> float:
    """``calculate_spatial_disbalance``."""
    rest = work % threads
    idle = threads - rest if work < threads else min(threads - rest, rest)
    return idle / threads


def _padded_depth(depth: int) -> int:
    """Columns of a turned block: whole cache lines, and no large power of two."""
    padded = round_up(depth, 32)
    return padded + 32 if padded >= 512 and padded & (padded - 1) == 0 else padded
