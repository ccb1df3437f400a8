"""Real values of outputs that CUDA's kernels make in other shapes than the CPU's."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pytest_torchmem import trace
from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.operators.custom_operators import OperatorModel, register_operator
from tests.results import on_fake_cuda

_OFFSETS = {
    "bags": ([0, 3], [0, 3, 7]),
    "an empty bag": ([0, 3, 3], [0, 3, 3, 7]),
    "an empty bag at the end": ([0, 3, 7], [0, 3, 7, 7]),
    "no bag": ([], [0]),
}


def _kinds_of_bags() -> Iterator[dict[str, Any]]:
    weights = torch.tensor([0.5, 2.0, -1.0, 3.0, 0.25, 1.0, 4.0])
    for name, mode, padding, scale, last, sparse in product(
        _OFFSETS, ("sum", "mean", "max"), (None, 1), (None, weights), (False, True), (False, True)
    ):
        offsets = _OFFSETS[name][last]
        if (scale is not None and mode != "sum") or (sparse and mode == "max"):
            continue  # torch refuses these
        count = 0 if name == "no bag" else len(weights)
        yield {
            "indices": torch.tensor([0, 1, 1, 0, 1, 4, 2][:count], dtype=torch.int64),
            "offsets": torch.tensor(offsets, dtype=torch.int64),
            "mode": mode,
            "padding_idx": padding,
            "per_sample_weights": None if scale is None else scale[:count],
            "include_last_offset": last,
            "sparse": sparse,
        }


def _bags(device: str) -> list[Tensor]:
    found: list[Tensor] = []
    for kind in _kinds_of_bags():
        given = tree_map_only(Tensor, lambda one: one.to(device), kind)
        indices = given.pop("indices")
        table = torch.linspace(-3, 5, 20).reshape(5, 4).to(device).requires_grad_()
        scale = given["per_sample_weights"]
        if scale is not None:
            given["per_sample_weights"] = scale = scale.detach().clone().requires_grad_()
        output = F.embedding_bag(indices, table, **given)
        factors = torch.arange(1.0, output.numel() + 1, device=device).reshape(output.shape)
        (output * factors).sum().backward()
        found += [output.detach(), table.grad.to_dense()]
        if scale is not None:
            found.append(scale.grad.clone())
    return found


def test_bags_of_embeddings() -> None:
    found = on_fake_cuda(lambda: [one.cpu() for one in _bags("cuda")], values="real")
    torch.testing.assert_close(found, _bags("cpu"))


@pytest.mark.parametrize("kind", ["BatchNorm1d", "LayerNorm", "RMSNorm", "GroupNorm"])
def test_norms_of_half_with_statistics_in_float(kind: str) -> None:
    def gradients(device: str) -> list[Tensor]:
        sizes = (1, 3) if kind == "GroupNorm" else (3,)
        norm: Any = getattr(torch.nn, kind)(*sizes).to(device, torch.bfloat16)
        x = torch.linspace(-2, 3, 12, dtype=torch.bfloat16).reshape(4, 3).to(device)
        output = norm(x.requires_grad_())
        (output * output.detach().exp()).sum().backward()
        return [output.detach().cpu(), x.grad.cpu(), norm.weight.grad.cpu()]

    found = on_fake_cuda(lambda: gradients("cuda"), values="real")
    torch.testing.assert_close(found, gradients("cpu"))


@pytest.mark.parametrize("length", [32, 40])
def test_sums_of_efficient_attention_are_padded(length: int) -> None:

    def program() -> Tensor:
        query = torch.ones(1, 2, length, 8, device="cuda")
        attend = torch.ops.aten._scaled_dot_product_efficient_attention
        return attend(query, query, query, None, True)[1].cpu()

    expected = torch.full((1, 2, -(-length // 32) * 32), torch.inf)
    expected[..., :length] = torch.full((length, length), 8**0.5).logsumexp(-1)
    torch.testing.assert_close(on_fake_cuda(program, values="real"), expected)


def test_values_of_another_shape_are_not_known(request: pytest.FixtureRequest) -> None:
    model = OperatorModel("aten::log_sigmoid_backward", values=lambda *_: torch.zeros(3))
    request.addfinalizer(register_operator(model))

    def program() -> None:
        leaf = torch.ones(4, device="cuda", requires_grad=True)
        F.logsigmoid(leaf).sum().backward()
        leaf.grad.tolist()

    with pytest.raises(UnknownValueError, match=r"of shape \(3,\) for an output of \(4,\)"):
        trace(program, device="cuda", values="real")


def test_rows_that_batch_norm_takes_in_evaluation_are_known() -> None:
    def body() -> None:
        norm, rows = torch.nn.BatchNorm1d(3).to("cuda").eval(), torch.ones(4, 3, device="cuda")
        assert norm(rows.requires_grad_()).sum().item() == pytest.approx(12, abs=1e-3)
        norm(rows).sum().backward()
        assert rows.grad[0, 0].item() == pytest.approx(1, abs=1e-3)

    assert trace(body, device="cuda").warnings == ()


def _products(wider: Callable[..., list[Tensor]]) -> list[Tensor]:
    torch.manual_seed(0)
    added, first, second = torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    given = [one.bfloat16() for one in (first, second)]
    return [
        *wider(torch.mm, *(one[0] for one in given)),
        *wider(torch.bmm, *given),
        *wider(torch.addmm, added[0], *(one[0] for one in given), beta=0.5, alpha=2),
        *wider(torch.baddbmm, added, *given, beta=0.5, alpha=2),
    ]


def test_products_in_a_wider_type() -> None:
    def on_cuda(function: Callable[..., Tensor], *given: Tensor, **factors: float) -> list[Tensor]:
        moved = [one.cuda() for one in given]
        run = partial(function, *moved, out_dtype=torch.float32, **factors)
        return [run().cpu(), run(out=torch.empty_like(run())).cpu()]

    def on_cpu(function: Callable[..., Tensor], *given: Tensor, **factors: float) -> list[Tensor]:
        return [function(*(one.float() for one in given), **factors)] * 2

    found = on_fake_cuda(lambda: _products(on_cuda), values="real")
    torch.testing.assert_close(found, _products(on_cpu))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_of_two_processes(dtype: torch.dtype) -> None:
    """Two halves of a batch, as ``SyncBatchNorm`` goes about it, are normalized as the whole."""
    torch.manual_seed(0)
    whole, weight, bias = torch.randn(6, 3, 4) + 1, torch.rand(3), torch.randn(3)
    gradient = torch.randn(6, 3, 4)
    whole, gradient = whole.to(dtype), gradient.to(dtype)

    def halves() -> list[Tensor]:
        running = [torch.zeros(3).cuda(), torch.ones(3).cuda()]
        inputs = [half.contiguous().cuda() for half in whole.split([2, 4])]
        grads = [half.contiguous().cuda() for half in gradient.split([2, 4])]
        scale, shift = weight.cuda(), bias.cuda()
        stats = [torch.batch_norm_stats(half, 1e-5) for half in inputs]
        means, roots = (torch.stack(one) for one in zip(*stats, strict=True))
        counts = torch.tensor([8.0, 16.0]).cuda()
        more = (*running, 0.1, 1e-5, counts)
        gather = torch.batch_norm_gather_stats_with_counts
        mean, root = gather(inputs[0], means, roots, *more)
        outputs = [torch.batch_norm_elemt(one, scale, shift, mean, root, 1e-5) for one in inputs]
        sums = [
            torch.batch_norm_backward_reduce(grad, one, mean, root, scale, True, True, True)
            for grad, one in zip(grads, inputs, strict=True)
        ]
        both = [one[0] + one[1] for one in zip(*sums, strict=True)]
        found = [
            torch.batch_norm_backward_elemt(grad, one, mean, root, scale, *both[:2], counts.int())
            for grad, one in zip(grads, inputs, strict=True)
        ]
        return [one.cpu() for one in (torch.cat(outputs), torch.cat(found), *both[2:], *running)]

    running = [torch.zeros(3), torch.ones(3)]
    leaves = [one.float().requires_grad_() for one in (whole, weight, bias)]
    output = F.batch_norm(leaves[0], *running, *leaves[1:], training=True)
    expected = [output, *torch.autograd.grad(output, leaves, gradient.float()), *running]
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    found = on_fake_cuda(halves, values="real")
    torch.testing.assert_close([*map(Tensor.float, found)], expected, **tolerance)


def _reference(tensors, lengths, left, right) -> list[Tensor]:
    """Attention of each sequence alone, and gradients; queries end where keys end."""
    leaves = [one.detach().float().requires_grad_() for one in tensors]
    parts = [one.split([*of_one]) for one, of_one in zip(leaves, lengths, strict=True)]
    outputs = []
    for query, key, value in zip(*parts, strict=True):
        rows, columns = len(query), len(key)
        ahead = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
        mask = (ahead <= (columns if right < 0 else right)) & (
            ahead >= (-left if left >= 0 else -columns)
        )
        given = [one.transpose(0, 1) for one in (query, key, value)]
        found = F.scaled_dot_product_attention(*given, attn_mask=mask)
        outputs.append(found.transpose(0, 1))
    output = torch.cat(outputs)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_in_nested_tensors(dtype: torch.dtype, is_causal: bool) -> None:
    torch.manual_seed(0)
    given = [torch.randn(10, 2, 8).to(dtype) for _ in range(3)]

    def step() -> list[Tensor]:
        leaves = [one.cuda().requires_grad_() for one in given]
        offsets = torch.tensor([0, 3, 10]).cuda()
        nested = [torch.nested.nested_tensor_from_jagged(one, offsets) for one in leaves]
        turned = [one.transpose(1, 2) for one in nested]
        output = F.scaled_dot_product_attention(*turned, is_causal=is_causal)
        whole = output.transpose(1, 2).values()
        grads = torch.autograd.grad(whole.float().square().sum(), leaves)
        return [one.detach().cpu() for one in (whole, *grads)]

    real = _reference(given, [[3, 7]] * 3, -1, 0 if is_causal else -1)
    tolerance = {} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    found = on_fake_cuda(step, values="real")
    torch.testing.assert_close([*map(Tensor.float, found)], real, **tolerance)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)])
def test_attention_of_sequences_of_several_lengths(window: tuple[int, int]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    given = [torch.randn(rows, 2, 8).bfloat16() for rows in (8, 10, 10)]

    def step() -> list[Tensor]:
        leaves = [one.cuda().requires_grad_() for one in given]
        starts = [torch.tensor(one).int().cuda() for one in ([0, 3, 8], [0, 3, 10])]
        output = varlen_attn(*leaves, *starts, 5, 7, window_size=window)
        grads = torch.autograd.grad(output.float().square().sum(), leaves)
        return [one.detach().cpu() for one in (output, *grads)]

    real = _reference(given, [[3, 5], [3, 7], [3, 7]], *window)
    found = on_fake_cuda(step, values="real")
    torch.testing.assert_close([*map(Tensor.float, found)], real, rtol=5e-2, atol=5e-2)
