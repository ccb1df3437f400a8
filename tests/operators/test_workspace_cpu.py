"""Workspaces of CPU kernels, against what the real allocator gives out on this machine."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_torchmem import measure, trace
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.targets.host import REFERENCE
from tests.asked import workspace_of
from tests.operators.workspaces import assert_predicted, onednn, skip_estimates


def image(*shape: int, dtype: torch.dtype = torch.float32, channels_last: bool = False):
    tensor = torch.randn(shape).to(dtype)
    if channels_last:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor.requires_grad_()


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalization(threads: int, channels_last: bool) -> None:
    x = image(2, 16, 9, 9, channels_last=channels_last)
    weight, bias = image(16), image(16)
    assert_predicted(
        lambda: F.batch_norm(x, None, None, weight, bias, True),
        lambda: F.group_norm(x, 4, weight, bias),
        lambda: F.layer_norm(x, (9,), image(9)),
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_pooling_and_padding(threads: int, channels_last: bool) -> None:
    x = image(2, 3, 17, 18, channels_last=channels_last)
    assert_predicted(
        lambda: F.max_pool2d(x, 3, 2, 1),
        lambda: F.avg_pool2d(x, 2),
        lambda: F.adaptive_avg_pool2d(x, (2, 5)),
        lambda: F.pad(x, (1, 2, 2, 1), mode="reflect"),
        lambda: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda: F.interpolate(x, size=(90, 90), mode="bicubic"),
        lambda: x.median(1),
        lambda: x.nanmedian(2),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions(threads: int, dtype: torch.dtype) -> None:
    x = image(8, 300, 17, dtype=dtype)
    assert_predicted(
        lambda: x.sum(),
        lambda: x.sum((0, 2)),
        lambda: x.mean(1),
        lambda: x.logsumexp(0),
        lambda: x.detach().transpose(0, 2).argmax(),
        lambda: x.detach().bool().sum(1),
        lambda: F.softmax(x, 1),
        lambda: torch.sort(x, 1),
    )


def test_types_are_promoted(threads: int) -> None:
    x = image(8, 30, 5)
    mask = torch.ones(8, 30, 5, dtype=torch.bool)
    plain = x.detach()
    assert_predicted(lambda: x * mask, lambda: x + 2, lambda: plain.bfloat16().add_(plain))


@onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 34, 64])
def test_products(threads: int, rows: int, dtype: torch.dtype) -> None:
    first, second = image(rows, 65, dtype=dtype), image(65, 34, dtype=dtype)
    batch, bias = image(3, rows, 65, dtype=dtype), image(34, dtype=dtype)
    assert_predicted(
        lambda: first @ second,
        lambda: torch.addmm(bias, first, second, alpha=0.5),
        lambda: F.linear(batch, second.t(), bias),
        lambda: torch.bmm(batch, second.expand(3, 65, 34)),
        lambda: torch.baddbmm(image(3, rows, 34, dtype=dtype), batch, second.expand(3, 65, 34)),
    )


@pytest.mark.parametrize("rows", [3, 30])
def test_conjugates_are_copied_where_blas_cannot_read_them(rows: int) -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.complex64)

    kinds: list[Callable[..., Tensor]] = [
        zeros,
        lambda *shape: zeros(*shape).conj(),
        lambda *shape: zeros(*shape[:-2], shape[-1], shape[-2]).mT.conj(),
        lambda *shape: zeros(*shape, 2)[..., 0].conj(),
    ]

    def program(name: str, of_first: int, of_second: int) -> Callable[[], object]:
        def step() -> object:
            batch = (2,) if name == "bmm" else ()
            first, second = kinds[of_first](*batch, rows, 20), kinds[of_second](*batch, 20, 8)
            out = {"out": zeros(8, rows).t()} if name == "mm_out" else {}
            if name == "addmm":
                return torch.addmm(zeros(8), first, second)
            return (torch.bmm if batch else torch.mm)(first, second, **out)

        return step

    for case in product(("mm", "mm_out", "addmm", "bmm"), range(4), range(4)):
        assert trace(program(*case)).peak == measure(program(*case)).peak, case


@onednn
def test_products_with_a_vector(threads: int) -> None:
    """Where neither operand has gaps, oneDNN 3.13 has kernels for them."""
    matrix, wide = (image(*shape, dtype=torch.bfloat16) for shape in ((300, 400), (300, 408)))
    row, column = image(1, 300, dtype=torch.bfloat16), image(400, 1, dtype=torch.bfloat16)
    tall, deep = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((64, 16384), (33, 20000)))
    assert_predicted(
        lambda: row.detach() @ matrix.detach(),
        lambda: row.detach() @ wide.detach()[:, :400],
        lambda: matrix.detach() @ column.detach(),
        lambda: torch.bmm(row.detach().expand(2, 1, 300), matrix.detach().expand(2, 300, 400)),
        lambda: tall.new_zeros(1, 16384) @ tall.t(),
        lambda: tall.t().contiguous().t() @ tall.new_zeros(16384, 1),
        lambda: deep @ deep.new_zeros(20000, 1),
        lambda: torch.dot(deep[0], deep[1]),
        lambda: torch.vdot(deep[0, ::2], deep[0, :10000]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention(threads: int, dtype: torch.dtype) -> None:
    skip_estimates(dtype)
    query, key, value = (image(1, 2, length, 32, dtype=dtype) for length in (300, 700, 700))
    calls = assert_predicted(lambda: F.scaled_dot_product_attention(query, key, value))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {call.name for call in calls}


@onednn
def test_attention_in_bfloat16(threads: int) -> None:
    query, key, value = (image(2, 3, 130, 64, dtype=torch.bfloat16) for _ in range(3))
    lonely = image(1, 2, 33, 64, dtype=torch.bfloat16)  # the last of its rows is a block
    assert_predicted(
        lambda: F.scaled_dot_product_attention(query, key, value),
        lambda: F.scaled_dot_product_attention(lonely, key[:1, :2], value[:1, :2]),
    )


@onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("inputs", "hidden", "steps", "batch"),
    [(8, 16, 5, 3), (33, 20, 4, 5), (2, 3, 2, 1), (1, 5, 2, 2)],
)
def test_lstm(threads, dtype, inputs, hidden, steps, batch):
    layer = torch.nn.LSTM(inputs, hidden, 2, dtype=dtype)
    x = image(steps, batch, inputs, dtype=dtype)

    def inference(layer: torch.nn.Module, x: Tensor) -> None:
        with torch.no_grad():  # another kernel, that keeps nothing
            layer(x)

    assert trace(inference, layer, x, host="here").peak == measure(inference, layer, x).peak
    calls = assert_predicted(lambda: layer(x))
    layers = [call for call in calls if call.name == "aten::mkldnn_rnn_layer"]
    assert layers
    for call in layers:
        function = spec_of(call.operator).cpu.meta
        assert function is not None
        expected = function(*call.args)
        assert [one.shape for one in expected] == [one.shape for one in call.outputs]


def test_nothing_is_taken_for_an_empty_tensor() -> None:
    empty = torch.empty(0, 3, 8, 8, device="meta")
    weight = torch.empty(16, 3, 3, 3, device="meta")
    result = torch.empty(0, 16, 6, 6, device="meta")
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert workspace_of("convolution", REFERENCE, result, empty, weight, None, *settings).is_nothing


def test_a_reduced_loss_keeps_the_storage_of_all_elements() -> None:
    x, y = torch.randn(8, 30), torch.randn(8, 30)
    real = F.mse_loss(x, y)
    function = spec_of(torch.ops.aten.mse_loss.default).cpu.meta
    assert function is not None
    made = function(x.to("meta"), y.to("meta"))
    assert made.shape == real.shape
    assert made.untyped_storage().nbytes() == real.untyped_storage().nbytes() == 8 * 30 * 4


def test_counts(threads: int) -> None:
    tokens, halves = torch.arange(2000) % 7, torch.ones(2000).half()
    assert_predicted(
        lambda: tokens.bincount(),
        lambda: tokens[::2].bincount(halves[::2], minlength=9),
        lambda: tokens.bincount(halves.float()),
    )


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("shape", [(4, 3), (3,)])
def test_losses_of_labels(shape: tuple[int, ...], reduction: str) -> None:
    labels = torch.tensor([0, 1, -1]).expand(shape)

    def step(scores: Tensor, labels: Tensor) -> Tensor:
        loss = F.multilabel_margin_loss(scores, labels, reduction=reduction)
        loss.sum().backward()
        return loss

    given = image(*shape[::-1]).detach().t().requires_grad_(), labels
    traced, measured = trace(step, *given, host="here"), measure(step, *given)
    for peak in ("forward_peak", "backward_peak"):
        assert getattr(traced, peak) == getattr(measured, peak)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_numbers_in_place(threads: int, shape: tuple[int, ...]) -> None:
    """A Python number decides less than a tensor without sides, and an answer is converted."""
    x, counts = image(*shape).detach(), torch.ones(shape, dtype=torch.int64)
    assert_predicted(
        lambda: x.clone().div_(2.0),
        lambda: x.bfloat16().mul_(2.0),
        lambda: x.lt(2.0),
        lambda: counts.clone().eq_(2.5),
        lambda: torch.lt(counts, 2.5, out=torch.empty(shape)),
    )
