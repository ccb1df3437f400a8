"""Mistakes that ``meta`` takes are refused as on the device, in the words of its kernel."""

import gc
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.nn import functional

from pytest_torchmem import measure, trace


def numbers(*shape: int, dtype: torch.dtype = torch.float32, device: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


#: Programs with a mistake that CPU and CUDA word alike.
MISTAKES: dict[str, Callable[[str], Any]] = {
    "batched product": lambda d: torch.bmm(
        numbers(2, 3, 4, dtype=torch.half, device=d), numbers(2, 4, 5, device=d)
    ),
    "bias": lambda d: functional.linear(
        numbers(3, 4, device=d), numbers(5, 4, device=d), numbers(3, device=d)
    ),
    "gelu": lambda d: functional.gelu(numbers(3, device=d), approximate="other"),
    "norm": lambda d: functional.rms_norm(numbers(3, 4, device=d), (4,), numbers(3, device=d)),
    "norm of another shape": lambda d: functional.rms_norm(numbers(3, 4, device=d), (5,)),
    "norm of no shape": lambda d: functional.rms_norm(numbers(3, 4, device=d), ()),
    "buckets": lambda d: torch.bucketize(numbers(3, device=d), numbers(3, 4, device=d)),
    "no samples": lambda d: torch.multinomial(numbers(4, device=d), 0),
    "too many samples": lambda d: torch.multinomial(numbers(4, device=d), 5),
    "elements": lambda d: numbers(3, device=d).put_(
        numbers(2, dtype=torch.long, device=d), numbers(2, dtype=torch.double, device=d)
    ),
    "complex": lambda d: torch.complex(
        numbers(3, device=d), numbers(3, dtype=torch.double, device=d)
    ),
    "variance": lambda d: torch.var(numbers(3, dtype=torch.long, device=d)),
    "loss": lambda d: functional.smooth_l1_loss(
        numbers(3, device=d), numbers(3, device=d), beta=-1.0
    ),
    "copy to one place": lambda d: numbers(1, device=d).expand(3).copy_(numbers(3, device=d)),
    "one place in place": lambda d: torch.relu_(numbers(1, device=d).expand(3)),
    "limits": lambda d: torch.clamp(numbers(3, device=d)),
    "range": lambda d: numbers(3, device=d).uniform_(2, 1),
    "rate": lambda d: torch.poisson(numbers(3, device=d) - 1),
    "deviation": lambda d: torch.normal(0.0, numbers(3, device=d) - 1),
    "no probabilities": lambda d: torch.multinomial(numbers(3, device=d), 1),
    "overlap in place": lambda d: shifted(torch.add, d),
    "overlap of a copy": lambda d: shifted(lambda given, _, out: out.copy_(given), d),
    "output in one place": lambda d: torch.mm(
        numbers(2, 2, device=d), numbers(2, 2, device=d), out=numbers(2, device=d).expand(2, 2)
    ),
    "target of a loss": lambda d: functional.multi_margin_loss(
        numbers(5, 4, device=d), numbers(5, 4, dtype=torch.long, device=d)
    ),
    "rate of decay": lambda d: numbers(3, device=d).exponential_(0.0),
    "matrix": lambda d: numbers(2, 2, 2, device=d).trace(),
    "stride of a pool": lambda d: functional.max_pool1d(numbers(2, 8, device=d), 2, stride=0),
    "number that fills": lambda d: large(d).fill_(1e300),
    "number at a mask": lambda d: large(d).masked_fill_(large(d, torch.bool), 1j),
    "number at rows": lambda d: large(d).index_fill_(0, large(d, torch.long)[:1], 1e300),
    "number around": lambda d: functional.pad(large(d), (1, 1), value=1e300),
    "numbers of a factory": lambda d: torch.full((9,), 300, dtype=torch.uint8, device=d),
    "number of a factory": lambda d: torch.scalar_tensor(1j, dtype=torch.float, device=d),
    "number of an activation": lambda d: functional.softshrink(large(d), -0.5),
    "rows of a grouped product": lambda d: functional.grouped_mm(
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
    "value at rows": lambda d: numbers(9, device=d).index_put_(
        (numbers(2, dtype=torch.long, device=d),), numbers(3, device=d)
    ),
    "type at rows": lambda d: large(d).__setitem__(large(d, torch.long), large(d, torch.double)),
    "types of products": lambda d: torch.addbmm(
        numbers(2, 2, device=d),
        numbers(3, 2, 2, dtype=torch.half, device=d),
        numbers(3, 2, 2, device=d),
    ),
    "reflectors": lambda d: torch.ormqr(
        numbers(3, 3, device=d), numbers(2, device=d), numbers(3, 3, device=d)
    ),
    "type of extremes": lambda d: torch.aminmax(
        large(d), dim=0, out=(large(d, torch.double), large(d, torch.double))
    ),
    "type of a cross product": lambda d: torch.cross(
        numbers(9, 3, device=d),
        numbers(9, 3, device=d),
        dim=1,
        out=numbers(9, 3, dtype=torch.double, device=d),
    ),
    "row of a bag": lambda d: functional.embedding_bag(
        torch.full((1, 2), 5, device=d), numbers(5, 3, device=d)
    ),
    "floor of complex": lambda d: large(d, torch.cfloat).floor(),
    "type of a mask": lambda d: large(d).masked_scatter(large(d, torch.uint8), large(d)),
    "output of complex": lambda d: torch.complex(large(d), large(d), out=large(d)),
    "overlap of a value": lambda d: torch.kthvalue(
        (kept := large(d)), 1, out=(kept, large(d, torch.long))
    ),
    "position": lambda d: numbers(1 << 16, 64, device=d).gather(
        0, torch.full((1, 1), 1 << 16, device=d)
    ),
}


def large(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that is too large for its values to be known."""
    return torch.empty(1 << 20, dtype=dtype, device=device)


def shifted(run: Callable[..., Any], device: str) -> None:
    """Write what is made of a tensor's beginning behind it."""
    whole = numbers(5, device=device)
    run(whole[:-1], 1, out=whole[1:])


def refusal(mistake: Callable[[str], Any], device: str) -> str:
    """Return what an operator says that refuses."""
    with pytest.raises(RuntimeError) as refused:
        mistake(device)
    return str(refused.value)


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


def test_what_kernels_take_is_not_refused() -> None:
    found: list[float] = []

    def program() -> None:
        found.extend(numbers(3, device="cuda").copy_(5).tolist())
        in_one_place = numbers(1, device="cuda").expand(3)
        torch.mv(numbers(3, 2, device="cuda"), numbers(2, device="cuda"), out=in_one_place)
        large("cuda", torch.int8).add_(300)  # wraps around

    trace(program, device="cuda")
    assert found == [5.0] * 3


@pytest.mark.parametrize(("device", "names"), [("cpu", "m1 and m2"), ("cuda", "mat1 and mat2")])
def test_a_layer_in_another_dtype_than_its_input(device: str, names: str) -> None:
    layer = torch.nn.Linear(4, 5, bias=False).half()
    with pytest.raises(RuntimeError, match=f"expected {names} to have the same dtype"):
        trace(lambda: layer.to(device)(numbers(3, 4, device=device)), device=device)


#: Programs that the CPU refuses, most of them by its own name for the kernel.
TYPES: dict[str, Callable[[], Any]] = {
    "softmax of integers": lambda: large("cpu", torch.long)[:9].softmax(0),
    "loss of integers": lambda: functional.mse_loss(
        *[numbers(9, dtype=torch.long, device="cpu")] * 2
    ),
    "gelu of integers": lambda: functional.gelu(large("cpu", torch.long)),
    "greatest of complex": lambda: numbers(9, dtype=torch.cfloat, device="cpu").max(),
    "bits of numbers": lambda: large("cpu") & large("cpu"),
    "inverse in half precision": lambda: torch.linalg.inv(
        numbers(3, 3, dtype=torch.half, device="cpu")
    ),
    "convolution of two types": lambda: functional.conv2d(
        numbers(1, 3, 9, 9, dtype=torch.half, device="cpu"), numbers(4, 3, 3, 3, device="cpu")
    ),
    "norm of two types": lambda: functional.layer_norm(
        numbers(3, 4, device="cpu"), (4,), numbers(4, dtype=torch.half, device="cpu")
    ),
    "products of two types": lambda: torch.bmm(
        numbers(2, 3, 4, dtype=torch.half, device="cpu"), numbers(2, 4, 5, device="cpu")
    ),
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
        (
            torch.nn.Conv2d(3, 4, 3, bias=False),
            "Input type (torch.cuda.HalfTensor) and weight type",
        ),
        (torch.nn.ConvTranspose2d(3, 4, 3, bias=False), "(torch.cuda.FloatTensor) should be the"),
        (torch.nn.LayerNorm(9), "expected scalar type Half but found Float"),
        (torch.nn.GroupNorm(1, 9), "expected scalar type Half but found Float"),
        (torch.nn.LSTM(9, 9), "RNN input dtype (torch.float16) does not match weight dtype"),
        (torch.nn.BCELoss(), "Found dtype Double but expected Half"),
    ],
    ids=str,
)
def test_types_that_the_gpu_refuses(mistake: torch.nn.Module, words: str) -> None:
    given = numbers(3, 9, 9, dtype=torch.half, device="cpu")
    others = [given.double()] if isinstance(mistake, torch.nn.BCELoss) else []
    with pytest.raises((RuntimeError, ValueError), match=re.escape(words)):
        trace(mistake, given, *others, device="cuda", loss_fn=lambda output: output.sum())


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            lambda: numbers(9, dtype=torch.long, device="cuda").softmax(0),
            "not implemented for 'Long'",
        ),
        (lambda: functional.gelu(large("cuda", torch.long)), "not implemented for 'Long'"),
        (lambda: large("cuda") & large("cuda"), "\"bitwise_and_cuda\" not implemented for 'Float'"),
    ],
)
def test_types_that_no_kernel_knows(mistake: Callable[[], Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        trace(mistake, device="cuda", values="none")


def test_what_only_kernels_of_the_gpu_take() -> None:
    def program() -> None:
        torch.histc(numbers(9, dtype=torch.long, device="cuda"))
        large("cuda", torch.bool).abs()
        numbers(3, 3, dtype=torch.bool, device="cuda").trace()
        torch.linalg.norm(numbers(9, dtype=torch.half, device="cuda"))
        functional.batch_norm(
            numbers(2, 3, 4, dtype=torch.half, device="cuda"),
            numbers(3, device="cuda"),
            numbers(3, device="cuda"),
        )

    trace(program, device="cuda")


def test_a_mask_of_another_shape() -> None:
    def program(device: str) -> None:
        numbers(9, device=device)[numbers(8, dtype=torch.bool, device=device)]

    with pytest.raises(IndexError) as real:
        program("cpu")
    for device in ("cpu", "cuda"):
        with pytest.raises(IndexError, match=re.escape(str(real.value))):
            trace(lambda device=device: program(device), device=device)


@pytest.mark.parametrize(
    ("device", "words"),
    [("cpu", "Expected dtype int32 or int64 for index"), ("cuda", "not implemented for 'Float'")],
)
def test_rows_are_selected_by_integers(device: str, words: str) -> None:
    def program() -> None:
        numbers(3, 4, device=device).index_select(0, numbers(2, device=device))

    with pytest.raises(RuntimeError, match=words):
        trace(program, device=device)


def test_a_list_takes_as_many_scalars_as_it_has_tensors(device: str) -> None:
    def program() -> None:
        given = [torch.ones(300, device=device) for _ in range(2)]
        made = torch._foreach_addcdiv(given, given, given, torch.full((2,), 2.0))
        assert made[1][0].item() == 3

    profile = trace(program, device=device)
    assert device == "cuda" or profile.peak == measure(program).peak

    def too_many() -> None:
        program()
        given = [torch.ones(300, device=device) for _ in range(2)]
        torch._foreach_addcdiv(given, given, given, torch.full((3,), 2.0))

    with pytest.raises(RuntimeError, match="Expected length of scalars"):
        trace(too_many, device=device)
