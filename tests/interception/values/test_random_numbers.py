"""Random numbers that a trace computes are the program's, whatever it did not compute before."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import trace
from pytest_torchmem.interception.values.contents import Values, ValuesBudget
from pytest_torchmem.interception.values.random_numbers import draw, moved_on, words_drawn
from tests.results import result_of

ROWS, COLUMNS = 2048, 65
"""More than ``ValuesBudget.CHEAP`` elements, and no multiple of a vector's 16."""


def in_checkpoint(x: Tensor) -> None:
    checkpoint(lambda t: F.dropout(t, 0.2), x, use_reentrant=False).sum().backward()


def set_back(x: Tensor) -> None:
    F.dropout(x)
    state = torch.get_rng_state()
    torch.randn_like(x)
    torch.rand(1)
    torch.set_rng_state(state)


def attention(x: Tensor) -> None:
    query = x[:, :64].reshape(4, 8, 64, 64)
    F.scaled_dot_product_attention(query, query, query, dropout_p=0.2)


#: What is drawn from, and not computed: ``x`` is not known.
DRAWS: Mapping[str, Callable[[Tensor], object]] = {
    "dropout": lambda x: F.dropout(x),
    "dropout in place": lambda x: F.dropout(x * 1, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "dropout of channels": lambda x: F.dropout1d(x.view(64, -1, COLUMNS), 0.3),
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "double": lambda x: torch.rand(x.shape, device=x.device, dtype=torch.float64),
    "randn": lambda x: torch.randn(x.shape, device=x.device),
    "randn_like": torch.randn_like,
    "half": lambda x: torch.empty_like(x, dtype=torch.bfloat16).normal_(),
    "complex": lambda x: torch.randn(x.shape, device=x.device, dtype=torch.complex64),
    "not contiguous": lambda x: torch.empty_like(x).t()[::2].normal_(),
    "normal of tensors": lambda x: torch.normal(x, x.abs() + 1),
    "few": lambda x: torch.empty(5, device=x.device).normal_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "exponential": lambda x: F.gumbel_softmax(x),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "randint": lambda x: torch.randint(0, 10, x.shape, device=x.device),
    "large integers": lambda x: torch.randint(0, 1 << 40, x.shape, device=x.device),
    "randperm": lambda x: torch.randperm(x.numel(), device=x.device),
    "one sample": lambda x: torch.multinomial(x.softmax(-1), 1),
    "samples": lambda x: torch.multinomial(x.softmax(-1), 3),
    "samples again": lambda x: torch.multinomial(x.softmax(-1), 3, replacement=True),
    "attention": attention,
    "lstm": lambda x: nn.LSTM(COLUMNS, 8, 3, dropout=0.2, device=x.device)(x.view(64, 32, -1)),
    "initialiser": lambda x: nn.init.trunc_normal_(torch.empty_like(x), std=0.02),
    "checkpoint": in_checkpoint,
    "state": set_back,
}


def draws_then_tells(told: dict[str, list[float]]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    x = torch.zeros(ROWS, COLUMNS, device=device, requires_grad=True)
    for name, draw_from in DRAWS.items():
        for _ in range(2):  # once without and once with a plan
            draw_from(x * 2)
            numbers = [torch.rand(1).item(), *torch.randint(0, 100, (3,)).tolist()]
            told.setdefault(name, []).extend([*numbers, torch.randn(1).item()])


def test_numbers_after_draws_that_are_not_computed(device, monkeypatch):
    monkeypatch.setattr(Values, "budget", lambda self: ValuesBudget(0, 0))
    for_real, traced = dict[str, list[float]](), dict[str, list[float]]()
    draws_then_tells(for_real)
    assert trace(draws_then_tells, traced, device=device).values == "in part"
    assert traced == for_real


@pytest.mark.parametrize("values", ["auto", "none"])
def test_as_many_draws_as_unknown_values_say(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Values, "budget", lambda one: ValuesBudget(0, 0) if one.computes else None)

    def program() -> bool:
        torch.poisson(torch.rand(1024, 1024))
        return bool(torch.rand(1).item() < 0.5)

    assert any("aten::poisson" in warning for warning in trace(program, values=values).warnings)


def test_first_pass_does_not_decide_by_numbers_whose_place_is_not_known() -> None:
    told: list[float] = []

    def program() -> None:
        torch.manual_seed(0)
        torch.poisson(torch.rand(2048, 2048))
        told.append(torch.rand(1).item())
        if told[-1] < 0.5:
            torch.zeros(3)

    program()
    assert not trace(program).warnings
    assert told[1:] == told[:1]


def test_program_that_decides_by_a_vector_is_run_again() -> None:
    def program() -> int:
        torch.manual_seed(0)
        torch.rand(4096, 4096)
        chances = torch.rand(64)
        return sum(bool(one < 0.5) for one in chances)

    assert result_of(program) == program()


@pytest.mark.parametrize("words", [1, 623, 624, 625, 1248, 9_000_001])
def test_moved_on_as_if_drawn(words: int) -> None:
    generator = torch.Generator().manual_seed(7)
    draw(generator, 100)
    state = generator.get_state()
    draw(generator, words)
    assert torch.equal(moved_on(state, words), generator.get_state())
    if words < 2000:
        assert words_drawn(state, generator.get_state(), most=words) == words


def test_initialisers_that_reject_are_not_counted() -> None:
    def program() -> float:
        torch.manual_seed(0)
        nn.init.trunc_normal_(torch.empty(2048, 2048))  # draws again until all are within bounds
        if (told := torch.rand(1).item()) > 2:
            torch.zeros(3)
        return told

    assert result_of(program) == program()


@pytest.mark.parametrize("draw_in", ["exponential_", "cauchy_", "log_normal_", "geometric_"])
def test_a_generator_of_the_program_draws(draw_in: str, device: str) -> None:
    """Torch's Python functions for the shapes of these refuse a generator."""

    def program(device: str) -> list[float]:
        generator = torch.Generator(device).manual_seed(1)
        chance = (0.5,) if draw_in == "geometric_" else ()
        drawn = getattr(torch.empty(3, device=device), draw_in)(*chance, generator=generator)
        return drawn.tolist()

    assert result_of(lambda: program(device), device=device) == program("cpu")


def test_a_split_is_permuted_on_the_host() -> None:
    def program(device: str) -> list[int]:
        torch.ones(2, device=device)
        generator = torch.Generator().manual_seed(1)
        first, _ = torch.utils.data.random_split(range(10), [7, 3], generator=generator)  # type: ignore[arg-type]
        return list(first.indices)

    assert result_of(lambda: program("cuda"), device="cuda") == program("cpu")


UNREAD: Mapping[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": lambda x: torch.bernoulli(x, 0.3),
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randn_like": torch.randn_like,
    "beta of zero": lambda x: torch.addmm(x, torch.rand(4, 2), torch.rand(2, 4), beta=0),
    "batched": lambda x: torch.baddbmm(x, torch.rand(4, 4, 2), torch.rand(4, 2, 4), beta=0),
}


@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD)
def test_what_is_not_read_need_not_be_known(make: Callable[[Tensor], Tensor]) -> None:
    """As ``vmap`` draws dropout: from the shape of memory that nobody has written to."""

    def body() -> list[Any]:
        torch.manual_seed(1)
        return make(torch.empty(4, 4)).tolist()

    assert result_of(body, values="real") == body()
