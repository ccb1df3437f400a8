"""``flex_attention`` in what ``torch.compile`` wraps: the fused kernel's requests, and no scores.

A trace runs what is compiled eagerly. Eager ``flex_attention`` makes the whole matrix of scores,
which its compiled form never has. So here it requests what Inductor's kernels do
(torch/_inductor/kernel/flex/flex_attention.py and flex_decoding.py), and ``create_block_mask`` what
a fused reduction leaves. Values are computed on the host, some rows of scores at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.values.known import NotKnown
from pytest_torchmem.torch_private import flex_attention as private
from pytest_torchmem.torch_private.tensors import current_graph_task

_Function = Callable[..., Any]
_ROWS_AT_ONCE = 1 << 24
"""Scores that are computed together, at most."""
_SHORT = 128
"""Queries from which on the ordinary kernel is taken (``_use_flex_decoding``)."""


@contextmanager
def flex_attention(trace: TraceContext, module: Any) -> Iterator[None]:
    """Stand in for the kernels of ``torch.nn.attention.flex_attention``, which is imported."""
    fused = _Fused(trace)
    with (
        private.captured_tensors_lifted(),
        private.flex_kernels_replaced(fused.kernels),
        private.block_masks_replaced(fused.masks),
    ):
        yield


class _Mask(NamedTuple):
    """A mask that is not made, but reduced to blocks as it is computed."""

    make: Callable[..., Tensor]
    arguments: tuple[Any, ...]


class _Fused:
    """What runs in the place of eager kernels and masks where Inductor would compile them."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._lines: set[str] = set()
        """Lines whose attention was fused: a checkpoint runs them again, in the backward."""
        self._outputs: set[tuple[torch.device, int]] = set()
        """The outputs of fused kernels, whose backward is fused too."""

    # -- what is replaced --------------------------------------------------------------------------

    def kernels(self, run: _Function, run_backward: _Function) -> tuple[_Function, _Function]:
        """Return kernels that run torch's own where nothing is compiled."""

        def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
            if not self._is_fused(query):
                return run(query, key, value, *rest)
            return self._forward(run, query, key, value, *rest)

        def backward(query: Tensor, key: Tensor, value: Tensor, out: Tensor, *rest: Any) -> Any:
            if self._trace.off() or self._number(out) not in self._outputs:
                return run_backward(query, key, value, out, *rest)
            return self._backward(run_backward, query, key, value, out, *rest)

        return forward, backward

    def masks(self, make: _Function, convert: _Function) -> tuple[_Function, _Function]:
        """Return ``create_mask`` and what makes blocks of a mask."""

        def create_mask(
            mod_fn: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, device: Any = None
        ) -> Any:
            on = torch.device("cuda" if device is None else device)
            if self._trace.off() or on.type != "cuda" or not private.in_what_inductor_compiles():
                return make(mod_fn, B, H, Q_LEN, KV_LEN, device)
            return _Mask(make, (mod_fn, B or 1, H or 1, Q_LEN, KV_LEN, on))

        def to_blocks(mask: Any, *rest: Any, **kwargs: Any) -> Any:
            if not isinstance(mask, _Mask):
                return convert(mask, *rest, **kwargs)
            return self._blocks(mask, convert, *rest, **kwargs)

        return create_mask, to_blocks

    def _is_fused(self, query: Tensor) -> bool:
        if self._trace.off() or not self._trace.is_on_gpu(query):
            return False
        line = self._trace.user_line()
        if private.in_what_inductor_compiles():
            self._lines.add(line)
            return True
        return current_graph_task() != -1 and line in self._lines

    # -- attention ---------------------------------------------------------------------------------

    def _forward(self, dense: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, block_mask, _, options = args[:7]
        self._trace.note_fused("flex_attention")
        batch, heads, queries, _ = query.shape
        real = self._trace.computed_aside(
            lambda: _unchecked(_forward_in_rows, dense, *args), _operations(query, key, value)
        )
        if _decodes(query, value, block_mask[3], options):
            # flex_decoding.py, create_flex_decoding_kernel
            splits = max(self._trace.gpu.multiprocessors // max(batch * key.shape[1], 1) * 2, 1)
            splits = options.get("SPLIT_KV", splits)
            shape = (batch, splits, heads, queries)
            sums = [query.new_empty(shape, dtype=torch.float32) for _ in range(2)]
            parts = query.new_empty((*shape, value.shape[3]), dtype=torch.float32)
            logsumexp = query.new_empty(batch, heads, queries, dtype=torch.float32)
            most = query.new_empty(0, dtype=torch.float32)
            del sums, parts
        else:
            logsumexp = query.new_empty(batch, heads, queries, dtype=torch.float32)
            most = query.new_empty(batch, heads, queries, dtype=torch.float32)
        out = _like(query, (batch, heads, queries, value.shape[3]))
        if not options.get("OUTPUT_MAX", False):  # it is made, and not kept
            most = query.new_empty(0, dtype=torch.float32)
        self._outputs.add(self._number(out))
        self._give([out, logsumexp, *([most] if most.numel() else [])], real)
        return out, logsumexp, most

    def _backward(self, dense: Callable[..., Any], *args: Any) -> Any:
        query, key, value = args[:3]
        grad_logsumexp, options, captured = args[6], args[11], args[12]
        batch, heads, queries, width = query.shape
        real = self._trace.computed_aside(
            lambda: _unchecked(_backward_in_rows, dense, *args), 3 * _operations(query, key, value)
        )
        delta = query.new_empty(batch, heads, queries, dtype=torch.float32)
        kept = [delta] if grad_logsumexp is None else [delta, torch.empty_like(delta)]
        grad_query = _like(query, (batch, heads, queries, width))
        grad_value = _like(value, (batch, *value.shape[1:]))
        grads = [_gradient(buffer) for buffer in captured]
        grad_key = _like(key, (batch, *key.shape[1:]))
        del kept, delta, options
        if key.shape[0] != batch:
            grad_key, grad_value = (one.sum(0, keepdim=True) for one in (grad_key, grad_value))
        given = [
            one.to(buffer.dtype) if isinstance(one, Tensor) else None
            for one, buffer in zip(grads, captured, strict=True)
        ]
        result = (grad_query, grad_key, grad_value, tuple(given))
        self._give([*result[:3], *given], None if real is None else [*real[:3], *real[3]])
        return result

    def _number(self, out: Tensor) -> tuple[torch.device, int]:
        record = self._trace.record(out)
        return (torch.device("meta"), 0) if record is None else (record.ledger.device, record.index)

    def _give(self, made: list[Any], real: list[Any] | None) -> None:
        """Let what was requested have the values that were computed, if they were."""
        tensors = [one for one in made if isinstance(one, Tensor)]
        found = None if real is None else [one for one in real if isinstance(one, Tensor)]
        with self._trace.working():
            self._trace.values.give(tensors, found)

    # -- masks -------------------------------------------------------------------------------------

    def _blocks(
        self,
        mask: _Mask,
        convert: Callable[..., Any],
        Q_BLOCK_SIZE: int = 128,
        KV_BLOCK_SIZE: int = 128,
        separate_full_blocks: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return how full the blocks of a mask are, as a fused reduction leaves it."""
        mod_fn, batch, heads, queries, keys, device = mask.arguments
        self._trace.note_fused("create_block_mask")
        sizes = (Q_BLOCK_SIZE, KV_BLOCK_SIZE, separate_full_blocks)
        rows = max(Q_BLOCK_SIZE, _rows(batch * heads * keys) // Q_BLOCK_SIZE * Q_BLOCK_SIZE)

        def in_rows() -> list[Any]:
            found = []
            for start in range(0, queries, rows):
                some = min(rows, queries - start)
                part = mask.make(_from_row(mod_fn, start, 2), batch, heads, some, keys, "cpu")
                found.append(convert(part, *sizes))
            return [
                None if parts[0] is None else torch.cat(parts, dim=2)
                for parts in zip(*found, strict=True)
            ]

        real = self._trace.computed_aside(in_rows, batch * heads * queries * keys)
        shape = (batch, heads, -(-queries // Q_BLOCK_SIZE), -(-keys // KV_BLOCK_SIZE))
        partial = torch.empty(shape, dtype=torch.int8, device=device)
        full = torch.empty_like(partial) if separate_full_blocks else None
        self._give([partial, full], real)
        return partial, full


def _unchecked(compute: Callable[..., list[Any]], *args: Any) -> list[Any]:
    """Return what is computed; raise ``NotKnown`` where a function of scores reads past the end.

    The fused kernel does not look whether positions are within what it reads (``indirect_indexing``
    of ``ModificationWrapper``, torch/_inductor/select_algorithm.py), and has whatever is there.
    """
    try:
        return compute(*args)
    except IndexError:
        raise NotKnown from None


def _decodes(query: Tensor, value: Tensor, indices: Tensor, options: Mapping[str, Any]) -> bool:
    """Return whether the kernel for a few queries is taken (``_use_flex_decoding``)."""
    backend = options.get("BACKEND", "AUTO")
    if backend != "AUTO":
        return bool(backend == "TRITON_DECODE")
    heads, ratio = query.shape[1], query.shape[1] // value.shape[1]
    of_mask = (1,) if ratio != 1 else (1, heads)
    return (
        not options.get("FORCE_USE_FLEX_ATTENTION", False)
        and not options.get("OUTPUT_MAX", False)
        and 0 < query.shape[2] < _SHORT
        and indices.shape[1] in of_mask
        and ratio > 0
        and ratio & (ratio - 1) == 0
    )


def _like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor without gaps, in the order of another, the last dimension innermost;
    torch/_inductor/kernel/flex/common.py, ``infer_dense_strides``.
    """
    last = len(shape) - 1
    order = sorted(range(last), key=lambda dim: (tensor.stride(dim), -dim))
    strides, elements = [0] * len(shape), 1
    for dim in (last, *order):
        strides[dim] = elements
        elements *= shape[dim]
    return tensor.new_empty_strided(shape, strides)


def _gradient(buffer: Any) -> Tensor | None:
    """Return what the gradients of a captured tensor are added up in."""
    if not isinstance(buffer, Tensor) or not buffer.requires_grad:
        return None
    return torch.zeros_like(buffer, dtype=torch.float32, memory_format=torch.contiguous_format)


def _operations(query: Tensor, key: Tensor, value: Tensor) -> int:
    return query.shape[:3].numel() * key.shape[2] * (query.shape[3] + value.shape[3])


# -- values, some rows of scores at a time ---------------------------------------------------------


def _rows(scores_in_a_row: int) -> int:
    return max(1, _ROWS_AT_ONCE // max(1, scores_in_a_row))


def _chunks(query: Tensor, key: Tensor) -> Iterator[slice]:
    rows = _rows(query.shape[0] * query.shape[1] * key.shape[2])
    for start in range(0, query.shape[2], rows):
        yield slice(start, min(start + rows, query.shape[2]))


def _from_row(function: Callable[..., Any], start: int, position: int) -> Callable[..., Any]:
    """Return a function of indices that counts queries from ``start`` on."""
    if not start:
        return function

    def shifted(*args: Any) -> Any:
        return function(*args[:position], args[position] + start, *args[position + 1 :])

    if position == 2:  # its kind is found by how many arguments it takes
        return lambda b, h, q_idx, kv_idx: shifted(b, h, q_idx, kv_idx)
    return shifted


def _forward_in_rows(dense: Callable[..., Any], *args: Any) -> list[Tensor]:
    query, key, value, score_mod, block_mask, *rest = args
    found = []
    for rows in _chunks(query, key):
        start = rows.start
        shifted = (*block_mask[:-1], _from_row(block_mask[-1], start, 2))
        score = _from_row(score_mod, start, 3)
        found.append(dense(query[:, :, rows], key, value, score, shifted, *rest))
    return [torch.cat(parts, dim=2) for parts in zip(*found, strict=True)]


def _backward_in_rows(dense: Callable[..., Any], *args: Any) -> list[Any]:
    query, key, value, out, logsumexp, grad_out, grad_logsumexp, forward, joint, mask, *rest = args
    queries: list[Tensor] = []
    sums: list[Any] | None = None
    for rows in _chunks(query, key):
        start = rows.start

        def part(tensor: Tensor | None, rows: slice = rows) -> Tensor | None:
            return None if tensor is None else tensor[:, :, rows]

        grad_query, *others, captured = dense(
            part(query),
            key,
            value,
            *map(part, (out, logsumexp, grad_out, grad_logsumexp)),
            _from_row(forward, start, 3),
            _from_row(joint, start, 3),
            (*mask[:-1], _from_row(mask[-1], start, 2)),
            *rest,
        )
        queries.append(grad_query)
        more = [*others, *captured]
        if sums is not None:
            pairs = zip(sums, more, strict=True)
            more = [None if one is None else one + other for one, other in pairs]
        sums = more
    assert sums is not None
    return [torch.cat(queries, dim=2), sums[0], sums[1], sums[2:]]
