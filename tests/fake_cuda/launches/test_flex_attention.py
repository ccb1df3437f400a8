"""Compiled ``flex_attention``: the fused kernel's requests, and the values of the eager one.

torch/_inductor/kernel/flex/flex_attention.py and flex_decoding.py say what the kernels request.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pytest_torchmem import MemoryProfile, trace
from tests.modules import Checkpointed, Parts

BLOCK = 512
COMPILED = torch.compile(flex_attention)


def on_fake_cuda(body: Callable[[], Any], **options: Any) -> MemoryProfile:
    return trace(body, device="cuda", **options)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def inputs(length, keys=0, heads=(4, 4), batch=2) -> list[Tensor]:
    shapes = [(heads[0], length), *[(heads[1], keys or length)] * 2]
    return [torch.randn(batch, *shape, 16, device="cuda", requires_grad=True) for shape in shapes]


def results(flex, masks=create_block_mask, **sizes) -> list[Tensor]:
    torch.manual_seed(0)
    query, key, value = inputs(**sizes)
    slope = torch.randn(query.shape[1], device="cuda", requires_grad=True)

    mask = masks(causal, None, None, query.shape[2], key.shape[2], device="cuda")
    out, sums = flex(
        query,
        key,
        value,
        score_mod=lambda score, b, h, q_idx, kv_idx: score + slope[h] * (q_idx - kv_idx) * 0.01,
        block_mask=mask,
        return_lse=True,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    (out.square().sum() + sums.sum()).backward()
    gradients = [one.grad for one in (query, key, value, slope)]
    assert all(gradient is not None for gradient in gradients)
    return [torch.tensor(one.tolist()) for one in (out, sums, *gradients)]


@pytest.mark.parametrize(
    "sizes", [{"length": 256}, {"length": 200, "keys": 300, "heads": (4, 2)}, {"length": 5}]
)
def test_values_are_those_of_eager_attention(sizes, monkeypatch):
    monkeypatch.setattr("pytest_torchmem.fake_cuda.flex_attention._ROWS_AT_ONCE", 100 * 8 * 300)
    found: list[list[Tensor]] = []
    for flex, masks in (
        (flex_attention, create_block_mask),
        (COMPILED, torch.compile(create_block_mask)),
    ):
        on_fake_cuda(lambda f=flex, m=masks: found.append(results(f, m, **sizes)), values="real")  # type: ignore[misc]
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)


def test_requests_of_the_fused_kernels() -> None:
    length, rows = 1024, blocks(2 * 4 * 1024 * 4)
    tensor = 2 * 4 * length * 16 * 4

    def body() -> None:
        query, key, value = inputs(length)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = COMPILED(query, key, value)
        masks = torch.cuda.memory_allocated() - before - tensor - rows
        assert 0 <= masks <= 6 * BLOCK  # of one block, which says that nothing is masked
        # The sums of the exponentials are kept for the backward, the largest scores are not.
        needed = torch.cuda.max_memory_allocated() - before
        assert 0 <= needed - (tensor + 2 * rows) <= 12 * BLOCK
        gradient = torch.ones_like(out)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(out, (query, key, value), gradient)
        assert torch.cuda.max_memory_allocated() - before == 3 * tensor + rows

    (told,) = on_fake_cuda(body, values="none").warnings
    assert "flex_attention, compiled, is counted as its fused kernel" in told
    assert "test_flex_attention.py:" in told


def test_a_few_queries_split_the_keys() -> None:
    """Twice as many splits as multiprocessors for each head of each sample (``get_split_k``)."""
    splits = 108 // 8 * 2
    parts = [splits * 2 * 4 * 8 * 4] * 2 + [splits * 2 * 4 * 8 * 16 * 4]

    def body() -> None:
        query, key, value = inputs(8, 1024)
        with torch.no_grad():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            COMPILED(query, key, value)
        assert torch.cuda.max_memory_allocated() - before >= sum(map(blocks, parts))

    on_fake_cuda(body, gpu="a100-80gb", values="none")


def test_compiled_masks_are_never_made() -> None:
    length = 1 << 14

    def body(masks: Callable[..., Any]) -> None:
        masks(causal, None, None, length, length, device="cuda")

    eager = on_fake_cuda(lambda: body(create_block_mask), values="none")
    compiled = on_fake_cuda(lambda: body(torch.compile(create_block_mask)), values="none")
    assert eager.peak > length * length
    assert compiled.peak < length * length // 200
    assert any("create_block_mask, compiled" in told for told in compiled.warnings)


class Block(Parts):
    def forward(self, x: Tensor) -> Tensor:
        parts = self.projection(x).unflatten(-1, (3, 2, 16)).transpose(1, 3)
        query, key, value = parts.unbind(2)
        result: Tensor = flex_attention(query, key, value)
        return result.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_inside_a_compiled_model_is_fused(checkpointed: bool) -> None:
    length = 2048

    block, x = Block(projection=nn.Linear(32, 96)), torch.randn(1, length, 32, requires_grad=True)
    whole = Checkpointed(inner=block) if checkpointed else nn.Sequential(block)
    peaks = [
        trace(model, x, device="cuda", values="none").peak
        for model in (whole, torch.compile(whole), torch.compile(whole, backend="eager"))
    ]
    scores = 2 * length * length * 4
    assert peaks[0] == peaks[2] > scores
    assert peaks[1] < scores


def test_attention_that_is_not_compiled_is_not_told_of() -> None:
    profile = on_fake_cuda(lambda: flex_attention(*inputs(256)), values="none")
    assert profile.warnings == ()
    assert profile.peak > 2 * 4 * 256 * 256 * 4


def test_the_operators_are_as_they_were() -> None:
    operator = torch.ops.higher_order.flex_attention
    before = dict(operator.py_kernels)
    on_fake_cuda(lambda: COMPILED(*inputs(128)))
    assert operator.py_kernels == before
