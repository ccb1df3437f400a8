"""A GPU's generator draws what its seed and its state say."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.interception.values.contents import Values, ValuesBudget
from tests.results import result_of

cuda = torch.cuda


def drawn(generator: torch.Generator | None = None) -> Tensor:
    return torch.rand(100, device="cuda", generator=generator)


def twice_after(set_back: Callable[[], object], draw: Callable[[], Tensor] = drawn) -> bool:
    set_back()
    first = draw()
    torch.rand(7)  # on the host
    set_back()
    return torch.equal(first, draw())


def states() -> dict[str, bool]:
    seeded = torch.Generator("cuda").manual_seed(1)
    drawn(seeded)
    state, offset = seeded.get_state(), seeded.get_offset()
    one, all_ = cuda.get_rng_state(), cuda.get_rng_state_all()

    def from_fork() -> Tensor:
        with torch.random.fork_rng(devices=[0]):
            return drawn()

    def by_default_generator() -> Tensor:
        return drawn(cuda.default_generators[0])

    def dropped() -> Tensor:
        return F.dropout(torch.ones(100, device="cuda"))

    def of_attention() -> Tensor:
        query = torch.ones(1, 2, 8, 16, device="cuda", dtype=torch.float16)
        return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)

    def of_layers() -> Tensor:
        torch.manual_seed(5)
        layers = nn.LSTM(4, 4, 2, dropout=0.5, device="cuda")
        return layers(torch.ones(3, 2, 4, device="cuda"))[0].detach()

    with_seed = {
        "rand": drawn,
        "default generator": by_default_generator,
        "dropout": dropped,
        "attention": of_attention,
        "lstm": of_layers,
        "like": lambda: torch.randn_like(torch.ones(50, device="cuda")),
        "randperm": lambda: torch.randperm(50, device="cuda"),
        "samples": lambda: torch.multinomial(torch.ones(50, device="cuda"), 9),
    }
    found = {
        name: twice_after(lambda: cuda.manual_seed(3), draw) for name, draw in with_seed.items()
    }
    found["all"] = twice_after(lambda: cuda.manual_seed_all(3))
    found["state"] = twice_after(lambda: cuda.set_rng_state(one))
    found["states"] = twice_after(lambda: cuda.set_rng_state_all(all_))
    found["fork"] = twice_after(lambda: None, from_fork)
    found["set_state"] = twice_after(lambda: seeded.set_state(state), lambda: drawn(seeded))
    found["set_offset"] = twice_after(lambda: seeded.set_offset(offset), lambda: drawn(seeded))
    found["some offset"] = seeded.set_offset(40).get_offset() == 40
    clone = seeded.clone_state()
    found["clone"] = torch.equal(drawn(seeded), drawn(clone))
    again = pickle.loads(pickle.dumps(seeded))
    found["pickled"] = again.device == seeded.device and torch.equal(drawn(seeded), drawn(again))
    cuda.seed()
    found["moves"] = not torch.equal(drawn(), drawn())
    before = torch.get_rng_state()
    drawn()
    found["host stays"] = torch.equal(before, torch.get_rng_state())
    at, _ = cuda.get_rng_state(), drawn()
    found["another state"] = not torch.equal(at, cuda.get_rng_state())
    return found


def test_seeds_and_states_say_what_is_drawn() -> None:
    found: list[dict[str, bool]] = []
    trace(lambda: found.append(states()), device="cuda", values="real")
    assert found == [dict.fromkeys(found[0], True)]


def seeded_together(device: str) -> list[float]:
    """As ``transformers.set_seed`` and others do."""
    torch.manual_seed(2)
    if device == "cuda":
        cuda.manual_seed_all(2)
        states = cuda.get_rng_state(), torch.get_rng_state()
    else:
        states = torch.get_rng_state(), torch.get_rng_state()
    numbers = []
    for _ in range(2):
        layer = nn.Linear(8, 8).to(device)  # drawn on the host
        output = F.dropout(layer(torch.randn(4, 8, device=device)), 0.5)
        numbers += [output.sum().item(), torch.rand(1, device=device).item()]
    (cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(states[0])
    torch.set_rng_state(states[1])
    return [*numbers, torch.rand(1).item(), torch.rand(1, device=device).item()]


def test_a_program_that_seeds_all_alike_draws_as_on_the_cpu() -> None:
    assert result_of(
        lambda: seeded_together("cuda"), device="cuda", values="real"
    ) == pytest.approx(seeded_together("cpu"), abs=1e-5)


def test_a_gpus_own_numbers_after_draws_that_are_not_computed(monkeypatch):
    monkeypatch.setattr(Values, "budget", lambda self: ValuesBudget(0, 0))
    told: list[Any] = []

    def program(device: str, seed: Callable[[int], object]) -> None:
        x = torch.zeros(2048, 65, device=device)
        for _ in range(2):
            seed(3)
            F.dropout(x * 2)
            told.append(torch.randint(0, 1 << 20, (3,), device=device).tolist())

    program("cpu", torch.manual_seed)
    trace(program, "cuda", cuda.manual_seed, device="cuda")
    assert told == told[:1] * len(told)
