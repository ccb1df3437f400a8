"""Mistakes that ``meta`` takes are refused as on the device, in the words of its kernel."""

import gc
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_torchmem import measure, trace
from tests.results import in_a_trace


def zeros(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


longs, halves = partial(zeros, dtype=torch.long), partial(zeros, dtype=torch.half)
doubles = partial(zeros, dtype=torch.double)

#: Programs with a mistake that CPU and CUDA word alike.
MISTAKES: dict[str, Callable[[str], Any]] = {
    "batched product": lambda d: torch.bmm(halves(d, 2, 3, 4), zeros(d, 2, 4, 5)),
    "bias": lambda d: F.linear(zeros(d, 3, 4), zeros(d, 5, 4), zeros(d, 3)),
    "gelu": lambda d: F.gelu(zeros(d, 3), approximate="other"),
    "norm": lambda d: F.rms_norm(zeros(d, 3, 4), (4,), zeros(d, 3)),
    "norm of another shape": lambda d: F.rms_norm(zeros(d, 3, 4), (5,)),
    "norm of no shape": lambda d: F.rms_norm(zeros(d, 3, 4), ()),
    "buckets": lambda d: torch.bucketize(zeros(d, 3), zeros(d, 3, 4)),
    "no samples": lambda d: torch.multinomial(zeros(d, 4), 0),
    "too many samples": lambda d: torch.multinomial(zeros(d, 4), 5),
    "elements": lambda d: zeros(d, 3).put_(longs(d, 2), doubles(d, 2)),
    "complex": lambda d: torch.complex(zeros(d, 3), doubles(d, 3)),
    "variance": lambda d: torch.var(longs(d, 3)),
    "loss": lambda d: F.smooth_l1_loss(zeros(d, 3), zeros(d, 3), beta=-1.0),
    "copy to one place": lambda d: zeros(d, 1).expand(3).copy_(zeros(d, 3)),
    "one place in place": lambda d: torch.relu_(zeros(d, 1).expand(3)),
    "limits": lambda d: torch.clamp(zeros(d, 3)),
    "range": lambda d: zeros(d, 3).uniform_(2, 1),
    "rate": lambda d: torch.poisson(zeros(d, 3) - 1),
    "deviation": lambda d: torch.normal(0.0, zeros(d, 3) - 1),
    "no probabilities": lambda d: torch.multinomial(zeros(d, 3), 1),
    "overlap in place": lambda d: shifted(torch.add, d),
    "overlap of a copy": lambda d: shifted(lambda given, _, out: out.copy_(given), d),
    "output in one place": lambda d: torch.mm(
        zeros(d, 2, 2), zeros(d, 2, 2), out=zeros(d, 2).expand(2, 2)
    ),
    "target of a loss": lambda d: F.multi_margin_loss(zeros(d, 5, 4), longs(d, 5, 4)),
    "rate of decay": lambda d: zeros(d, 3).exponential_(0.0),
    "matrix": lambda d: zeros(d, 2, 2, 2).trace(),
    "stride of a pool": lambda d: F.max_pool1d(zeros(d, 2, 8), 2, stride=0),
    "number that fills": lambda d: large(d).fill_(1e300),
    "number at a mask": lambda d: large(d).masked_fill_(large(d, torch.bool), 1j),
    "number at rows": lambda d: large(d).index_fill_(0, large(d, torch.long)[:1], 1e300),
    "number around": lambda d: F.pad(large(d), (1, 1), value=1e300),
    "numbers of a factory": lambda d: torch.full((9,), 300, dtype=torch.uint8, device=d),
    "number of a factory": lambda d: torch.scalar_tensor(1j, dtype=torch.float, device=d),
    "number of an activation": lambda d: F.softshrink(large(d), -0.5),
    "rows of a grouped product": lambda d: F.grouped_mm(
        torch.ones(8, 37, device=d),
        torch.ones(2, 16, 37, device=d).mT,
        offs=torch.tensor([3, 8], device=d, dtype=torch.int32),
    ),
    "scalars for a list": lambda d: torch._foreach_addcdiv_(
        [large(d)], [large(d)], [large(d)], torch.ones(2)
    ),
    "number for a list": lambda d: torch._foreach_mul_([large(d, torch.long)], 1.5),
    "complex number for a list": lambda d: torch._foreach_add_([large(d)], 1j),
    "power for a list": lambda d: torch._foreach_pow([large(d, torch.long)], -1),
    "norms of a list": lambda d: torch._foreach_norm([large(d, torch.long)]),
    "value at rows": lambda d: zeros(d, 9).index_put_((longs(d, 2),), zeros(d, 3)),
    "type at rows": lambda d: large(d).__setitem__(large(d, torch.long), large(d, torch.double)),
    "types of products": lambda d: torch.addbmm(
        zeros(d, 2, 2), halves(d, 3, 2, 2), zeros(d, 3, 2, 2)
    ),
    "reflectors": lambda d: torch.ormqr(zeros(d, 3, 3), zeros(d, 2), zeros(d, 3, 3)),
    "type of extremes": lambda d: torch.aminmax(large(d), dim=0, out=(large(d, torch.double),) * 2),
    "type of a cross product": lambda d: torch.cross(
        zeros(d, 9, 3), zeros(d, 9, 3), dim=1, out=doubles(d, 9, 3)
    ),
    "row of a bag": lambda d: F.embedding_bag(torch.full((1, 2), 5, device=d), zeros(d, 5, 3)),
    "floor of complex": lambda d: large(d, torch.cfloat).floor(),
    "type of a mask": lambda d: large(d).masked_scatter(large(d, torch.uint8), large(d)),
    "output of complex": lambda d: torch.complex(large(d), large(d), out=large(d)),
    "overlap of a value": lambda d: torch.kthvalue(
        (kept := large(d)), 1, out=(kept, large(d, torch.long))
    ),
    "scalars of a list": lambda d: [
        torch._foreach_addcdiv(*[[large(d)] * 2] * 3, torch.ones(count)) for count in (2, 3)
    ],
    "shape of a mask": lambda d: zeros(d, 9)[zeros(d, 8, dtype=torch.bool)],
    "position": lambda d: zeros(d, 1 << 16, 64).gather(0, torch.full((1, 1), 1 << 16, device=d)),
}


def large(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that is too large for its values to be known."""
    return torch.empty(1 << 20, dtype=dtype, device=device)


def shifted(run: Callable[..., Any], device: str) -> None:
    """Write what is made of a tensor's beginning behind it."""
    whole = zeros(device, 5)
    run(whole[:-1], 1, out=whole[1:])


def refusal(mistake: Callable[[str], Any], device: str) -> str:
    with pytest.raises((RuntimeError, IndexError)) as refused:
        mistake(device)
    return repr(refused.value)


def test_they_are_refused_in_the_words_of_torch() -> None:
    real = {name: refusal(mistake, "cpu") for name, mistake in MISTAKES.items()}
    for device in ("cpu", "cuda"):
        found: dict[str, str] = {}

        def program(device: str = device, found: dict[str, str] = found) -> None:
            for _ in range(2):  # what was refused once is refused again
                found.update((name, refusal(mistake, device)) for name, mistake in MISTAKES.items())

        trace(program, device=device)
        assert found == real


def test_what_was_refused_holds_nothing(device: str) -> None:
    """A program that goes on with less has what the arguments took, without a collection."""

    def program() -> None:
        for mistake in MISTAKES.values():
            with suppress(RuntimeError, IndexError, ValueError, TypeError):
                mistake(device)

    gc.disable()
    try:
        assert trace(program, device=device).end == 0
    finally:
        gc.enable()


@in_a_trace("cuda")
def test_what_kernels_take_is_not_refused() -> None:
    assert zeros("cuda", 3).copy_(5).tolist() == [5.0] * 3
    in_one_place = zeros("cuda", 1).expand(3)
    torch.mv(zeros("cuda", 3, 2), zeros("cuda", 2), out=in_one_place)
    large("cuda", torch.int8).add_(300)  # wraps around


#: Programs that the CPU refuses, most of them by its own name for the kernel.
TYPES: dict[str, Callable[[], Any]] = {
    "softmax of integers": lambda: large("cpu", torch.long)[:9].softmax(0),
    "loss of integers": lambda: F.mse_loss(*[longs("cpu", 9)] * 2),
    "gelu of integers": lambda: F.gelu(large("cpu", torch.long)),
    "greatest of complex": lambda: zeros("cpu", 9, dtype=torch.cfloat).max(),
    "bits of numbers": lambda: large("cpu") & large("cpu"),
    "inverse in half precision": lambda: torch.linalg.inv(halves("cpu", 3, 3)),
    "convolution of two types": lambda: F.conv2d(
        halves("cpu", 1, 3, 9, 9), zeros("cpu", 4, 3, 3, 3)
    ),
    "norm of two types": lambda: F.layer_norm(zeros("cpu", 3, 4), (4,), halves("cpu", 4)),
    "products of two types": lambda: torch.bmm(halves("cpu", 2, 3, 4), zeros("cpu", 2, 4, 5)),
}


@pytest.mark.parametrize("mistake", TYPES.values(), ids=TYPES)
def test_types_that_the_cpu_refuses(mistake: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)) as real:
        mistake()
    with pytest.raises(real.type) as traced:
        trace(mistake, values="none")
    assert str(traced.value) == str(real.value)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (nn.Conv2d(3, 4, 3, bias=False), "Input type (torch.cuda.HalfTensor) and weight type"),
        (nn.ConvTranspose2d(3, 4, 3, bias=False), "(torch.cuda.FloatTensor) should be the"),
        (nn.LayerNorm(9), "expected scalar type Half but found Float"),
        (nn.GroupNorm(1, 9), "expected scalar type Half but found Float"),
        (nn.LSTM(9, 9), "RNN input dtype (torch.float16) does not match weight dtype"),
        (nn.BCELoss(), "Found dtype Double but expected Half"),
    ],
    ids=str,
)
def test_types_that_the_gpu_refuses(mistake: nn.Module, words: str) -> None:
    given = halves("cpu", 3, 9, 9)
    others = [given.double()] if isinstance(mistake, nn.BCELoss) else []
    with pytest.raises((RuntimeError, ValueError), match=re.escape(words)):
        trace(mistake, given, *others, device="cuda", loss_fn=lambda output: output.sum())


def half_layer(device: str) -> Any:
    return nn.Linear(4, 5, bias=False).half().to(device)(zeros(device, 3, 4))


def rows_by_floats(device: str) -> Any:
    return zeros(device, 3, 4).index_select(0, zeros(device, 2))


@pytest.mark.parametrize(
    ("device", "mistake", "error", "words"),
    [
        ("cpu", half_layer, RuntimeError, "expected m1 and m2 to have the same dtype"),
        ("cuda", half_layer, RuntimeError, "expected mat1 and mat2 to have the same dtype"),
        ("cpu", rows_by_floats, RuntimeError, "Expected dtype int32 or int64 for index"),
        ("cuda", rows_by_floats, RuntimeError, "not implemented for 'Float'"),
        ("cuda", lambda d: longs(d, 9).softmax(0), NotImplementedError, "for 'Long'"),
        ("cuda", lambda d: F.gelu(large(d, torch.long)), NotImplementedError, "for 'Long'"),
        ("cuda", lambda d: large(d) & large(d), NotImplementedError, '"bitwise_and_cuda" not'),
    ],
)
def test_types_that_a_device_refuses_in_its_own_words(
    device: Any, mistake: Callable[[str], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        trace(mistake, device, device=device, values="none")


@in_a_trace("cuda")
def test_what_only_kernels_of_the_gpu_take() -> None:
    torch.histc(longs("cuda", 9))
    large("cuda", torch.bool).abs()
    zeros("cuda", 3, 3, dtype=torch.bool).trace()
    torch.linalg.norm(halves("cuda", 9))
    F.batch_norm(halves("cuda", 2, 3, 4), zeros("cuda", 3), zeros("cuda", 3))


def test_a_list_takes_as_many_scalars_as_it_has_tensors(device: str) -> None:
    def program() -> None:
        given = [torch.ones(300, device=device) for _ in range(2)]
        made = torch._foreach_addcdiv(given, given, given, torch.full((2,), 2.0))
        assert made[1][0].item() == 3

    profile = trace(program, device=device)
    assert device == "cuda" or profile.peak == measure(program).peak
