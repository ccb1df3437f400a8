"""Mistakes that ``meta`` takes are refused as on the device, in the words of its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from pytest_torchmem import trace


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
    "position": lambda d: numbers(1 << 16, 64, device=d).gather(
        0, torch.full((1, 1), 1 << 16, device=d)
    ),
}


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
            found.update((name, refusal(mistake, device)) for name, mistake in MISTAKES.items())

        trace(program, device=device)
        assert found == real


def test_what_kernels_take_is_not_refused() -> None:
    found: list[float] = []

    def program() -> None:
        found.extend(numbers(3, device="cuda").copy_(5).tolist())
        in_one_place = numbers(1, device="cuda").expand(3)
        torch.mv(numbers(3, 2, device="cuda"), numbers(2, device="cuda"), out=in_one_place)

    trace(program, device="cuda")
    assert found == [5.0] * 3


@pytest.mark.parametrize(("device", "names"), [("cpu", "m1 and m2"), ("cuda", "mat1 and mat2")])
def test_a_layer_in_another_dtype_than_its_input(device: str, names: str) -> None:
    layer = torch.nn.Linear(4, 5, bias=False).half()
    with pytest.raises(RuntimeError, match=f"expected {names} to have the same dtype"):
        trace(lambda: layer.to(device)(numbers(3, 4, device=device)), device=device)


@pytest.mark.parametrize(
    ("device", "words"),
    [("cpu", "Expected dtype int32 or int64 for index"), ("cuda", "not implemented for 'Float'")],
)
def test_rows_are_selected_by_integers(device: str, words: str) -> None:
    def program() -> None:
        numbers(3, 4, device=device).index_select(0, numbers(2, device=device))

    with pytest.raises(RuntimeError, match=words):
        trace(program, device=device)
