"""Values computed beside a trace: programs that decide by their data go where they really do."""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError, UsageError
from pytest_torchmem.interception.values.contents import Values, ValuesBudget
from pytest_torchmem.step.generators import ForwardDraws, forward_draws
from tests.modules import Parts
from tests.results import in_a_trace, on_fake_cuda, result_of


class Chosen(Parts):
    """Preferences, whose loss keeps a buffer for its backward on the CPU alone, and dropout."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, rejected = self.layer(x).transpose(1, 2).chunk(2, 1)
        return F.logsigmoid(F.dropout(chosen, 0.3) - rejected)


class Recurrent(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[0][:, -1])


def recurrent(kind: type[nn.RNNBase], **options: Any) -> nn.Module:
    layer = kind(6, 8, 2, batch_first=True, **options)
    return Recurrent(layer=layer, last=nn.Linear(16 if layer.bidirectional else 8, 3))


class Cells(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h, c = self.lstm(x[:, 0])
        h, c = self.lstm(x[:, 1], (h, c))
        return self.gru(h)


class Attending(Parts):
    """Attention with and without a mask, causal and grouped, with and without dropout."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(2, 10, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mask = torch.ones(10, 10, dtype=torch.bool, device=x.device).tril(2)
        first = F.scaled_dot_product_attention(query, key, value, None, self.dropout, True)
        second = F.scaled_dot_product_attention(query, key, value, mask, self.dropout)
        return self.norm((first + second).transpose(1, 2).reshape(2, 10, 32))


def attending(dropout: float = 0.0) -> nn.Module:
    return Attending(dropout=dropout, project=nn.Linear(32, 96), norm=nn.RMSNorm(32))


def convolutional() -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, groups=2), nn.GroupNorm(4, 16), nn.GELU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)]
    return nn.Sequential(*first, *second, *last)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutional": (convolutional, (4, 3, 16, 16)),
    "lstm": (lambda: recurrent(nn.LSTM, bidirectional=True), (4, 7, 6)),
    "gru": (lambda: recurrent(nn.GRU, dropout=0.3), (4, 7, 6)),
    "rnn": (lambda: recurrent(nn.RNN), (4, 7, 6)),
    "cells": (lambda: Cells(lstm=nn.LSTMCell(6, 8), gru=nn.GRUCell(8, 8)), (4, 2, 6)),
    "attention": (attending, (2, 10, 32)),
    "attention that drops": (lambda: attending(0.3), (2, 10, 32)),
    "chosen": (lambda: Chosen(layer=nn.Linear(6, 8)), (4, 7, 6)),
    "instances": (lambda: nn.InstanceNorm1d(10, affine=True), (4, 10, 6)),
}


def losses(make: Callable[[], nn.Module], shape: tuple[int, ...], device: str) -> list[float]:
    torch.manual_seed(1)
    model, x = make().to(device), torch.randn(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_the_real_run(model: str, device: str) -> None:
    found: list[float] = []
    made = MODELS[model]
    profile = trace(lambda: found.extend(losses(*made, device)), device=device, values="real")
    assert found == pytest.approx(losses(*made, "cpu"), rel=1e-5)
    assert profile.values == "real"
    assert not any("unknown value" in warning for warning in profile.warnings)


def test_dropout_drops_the_same_in_the_backward() -> None:
    """On cuda the fused kernels draw the mask again, from a generator that the trace keeps."""

    def program() -> tuple[Tensor, Tensor, weakref.ref[ForwardDraws]]:
        leaves = [torch.randn(1, 2, 16, 8, device="cuda").requires_grad_() for _ in range(3)]
        value, output = leaves[2], F.scaled_dot_product_attention(*leaves, dropout_p=0.5)
        output.sum().backward()
        # The gradient of the value is the summed weights: those of dropped positions are missing.
        weighted = (value.grad * value.detach()).sum()
        return output.detach().sum().cpu(), weighted.cpu(), weakref.ref(forward_draws())

    summed, weighted, draws = on_fake_cuda(program, values="real")
    assert summed.item() == pytest.approx(weighted.item(), rel=1e-4)
    assert draws() is None


def suppressed(boxes: Tensor, scores: Tensor, limit: float = 0.5) -> Tensor:
    """Non-maximum suppression, as it is written by hand."""
    order, kept = scores.argsort(descending=True), []
    while order.numel():
        best = order[0]
        kept.append(best)
        corners = torch.minimum(boxes[best, 2:], boxes[order, 2:])
        sides = (corners - torch.maximum(boxes[best, :2], boxes[order, :2])).clamp(min=0)
        area = (boxes[order, 2:] - boxes[order, :2]).prod(1)
        common = sides.prod(1)
        order = order[common / (area + area[0] - common) < limit]
    return torch.stack(kept)


def detection() -> None:
    torch.manual_seed(3)
    model = nn.Linear(16, 5)
    predicted = model(torch.randn(300, 16))
    boxes = torch.cat([predicted[:, :2], predicted[:, :2] + predicted[:, 2:4].exp()], 1)
    kept = suppressed(boxes.detach(), predicted[:, 4].detach())
    predicted[kept].square().sum().backward()


def routing() -> None:
    torch.manual_seed(4)
    x, gate = torch.randn(64, 32), nn.Linear(32, 4)
    experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    weights, chosen = gate(x).softmax(-1).max(-1)
    output = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        rows = (chosen == index).nonzero()[:, 0]
        output = output.index_add(0, rows, expert(x[rows]) * weights[rows, None])
    output.sum().backward()


def beams() -> None:
    torch.manual_seed(5)
    embedding, cell, head = nn.Embedding(20, 16), nn.GRUCell(16, 16), nn.Linear(16, 20)
    with torch.no_grad():
        tokens, state = torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 16)
        scores = torch.zeros(3)
        for _ in range(12):
            state = cell(embedding(tokens[:, -1]), state)
            ranked = (scores[:, None] + head(state).log_softmax(-1)).flatten().topk(3)
            scores, origin = ranked.values, ranked.indices // 20
            tokens = torch.cat([tokens[origin], (ranked.indices % 20)[:, None]], 1)
            state = state[origin]
            if (tokens[:, -1] == 7).any():
                break
        torch.zeros(tokens.unique().numel(), 1000)


def until_it_is_small() -> None:
    torch.manual_seed(6)
    model, x = nn.Linear(50, 50), torch.randn(64, 50)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    seen: list[float] = []
    while not seen or seen[-1] > 0.5 * seen[0]:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    assert seen[-1] < seen[0]
    torch.zeros(len(seen), 1000)


@pytest.mark.parametrize("values", ["auto", "real"])
@pytest.mark.parametrize("program", [detection, routing, beams, until_it_is_small])
def test_data_dependent_programs_need_what_they_need(program, values):
    traced, measured = trace(program, host="here", values=values), measure(program)
    assert traced.figures() == measured.figures()

    def on_gpu() -> None:
        with torch.device("cuda"):
            program()

    there = trace(on_gpu, device="cuda", values=values)
    assert (traced.values, there.values, there.peak > 0) == ("real", "real", True)


def unknown() -> Tensor:
    """Numbers that are not known but where values are computed, and not all alike."""
    return (torch.randn(90, 100) @ torch.randn(100, 90)) / 10


DECISIONS: dict[str, Callable[[Tensor], object]] = {
    "less": lambda x: x.mean() < -0.1,
    "and": lambda x: bool(x[0, 0] > 0) and bool(x[1, 1] > 0),
    "or": lambda x: bool(x[0, 0] > 9) or bool(x[1, 1] > 0),
    "not": lambda x: not (x[2, 2] > 0),
    "masks": lambda x: ((x > 0) & (x < 0.5)).sum().item(),
    "unknown and False": lambda x: ((x > 0) & x.new_zeros(90, 90, dtype=torch.bool)).any(),
    "any": lambda x: (x > 30).any(),
    "all": lambda x: (x < 30).all(),
    "min": lambda x: min(x[0, :5].tolist()),
    "max": lambda x: max(x[0, :5], key=float).item(),
    "argmax": lambda x: int(x[3].argmax()),
    "sorted": lambda x: sorted(range(5), key=lambda index: x[0, index].item()),
    "item": lambda x: x[0, 1].item() < x[0, 2].item(),
    "float": lambda x: float(x[0, 1]) < 0.3,
    "math": lambda x: math.exp(x[0, 1].item()) < 1.2,
    "sum": lambda x: sum(x[0, :3].tolist()) < 0.5,
    "int": lambda x: int(x[0, 1] * 100),
    "round": lambda x: round(x[0, 1].item()),
    "truth": lambda x: bool(x[0, 1].relu()),
    "array": lambda x: int(x.cpu().numpy().argmax()),
    "chosen": lambda x: torch.where(x > -99, x, torch.empty_like(x)).mean() < 0.01,
    "where": lambda x: len(torch.where(x > 0)[0]),
    "index": lambda x: tuple(x[x > 1].shape),
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)).mean() > 2.4,
    "equal": lambda x: torch.equal(x, x + 1e-9),
    "allclose": lambda x: torch.allclose(x, x + 1.0),
    "size": lambda x: torch.zeros((x > 0).sum().item()).numel(),
    "loop": lambda x: next(step for step in range(99) if (x * 0.9**step).abs().max() < 1),
    "unique": lambda x: x.round().unique().numel(),
    "text": lambda x: f"{x[0, 0].item():.3f}" > "0.1",
}


@pytest.mark.parametrize("question", DECISIONS)
def test_decisions_are_those_of_the_real_run(question: str, device: str) -> None:
    """But for a text that was made of a number: nobody can follow that."""
    found: list[object] = []

    def program(device: str) -> object:
        torch.manual_seed(2)
        answer = DECISIONS[question](unknown().to(device))
        return bool(answer) if isinstance(answer, Tensor) else answer

    profile = trace(lambda: found.append(program(device)), device=device)
    if profile.values == "real":
        assert found[-1] == pytest.approx(program("cpu"), rel=1e-6)
    else:
        assert profile.warnings or found[-1] == program("cpu")


def test_a_number_that_is_only_told_does_not_run_the_program_again(monkeypatch):
    small_budgets(monkeypatch, 10**9, 1000)
    runs: list[str] = []

    def program() -> None:
        total, losses = 0.0, []
        for _ in range(2):
            loss = unknown().square().mean()
            total += loss.item()
            losses.append(loss.item())
        count = (unknown() > 0).sum().item()
        runs.append(f"{total / 2:7.2f} {losses} {loss:.1e} {count} {count:04d} {count:*<4}")
        runs.append(f"{100 * count / 50:.1f} {1.0 - total:+.0%} {loss.item()!r}")

    profile = trace(program)
    assert runs == ["    nan [nan, nan] nan ?    ? ?***", "nan +nan% nan"]
    assert profile.values == "in part"
    assert len(profile.warnings) == 5  # every line that was told such a number


def test_a_pass_that_ends_leaves_nothing_behind_and_cannot_be_caught(monkeypatch, capsys):
    def first_is_small(self: Values) -> ValuesBudget:
        return ValuesBudget(10**9, 1000 if self is Values.ASKED_FOR else 10**9)

    monkeypatch.setattr(Values, "budget", first_is_small)
    ended: list[str] = []

    def program() -> None:
        try:
            if unknown().mean() > 0:
                ended.append("yes")
        except Exception:
            ended.append("caught")
        finally:
            print("finally")

    before = torch.get_rng_state()
    assert trace(program).values == "real"
    assert capsys.readouterr().out.count("finally") == 2
    assert ended == ["yes"]
    assert torch.equal(before, torch.get_rng_state())


def small_budgets(monkeypatch: pytest.MonkeyPatch, nbytes: int, operations: int) -> None:
    """Let no values be computed beyond what is always cheap, and then hardly more."""
    made = partial(ValuesBudget, nbytes, operations)
    monkeypatch.setattr(Values, "budget", lambda one: None if one is Values.REAL else made())
    monkeypatch.setattr(ValuesBudget, "CHEAP", 0)


@in_a_trace("cuda")
def test_what_follows_numbers_that_were_not_drawn_is_left_to_the_next_pass() -> None:
    query = torch.randn(2, 4, 198, 8, device="cuda")
    F.scaled_dot_product_attention(query, query, query, dropout_p=0.1)
    assert bool((F.dropout(torch.ones(12_672, device="cuda"), 0.1) == 0).any()) is True


def test_over_the_budget_an_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    small_budgets(monkeypatch, 100_000, 10**9)

    def decide(values: str) -> Any:
        return trace(lambda: bool(unknown().mean() > 3), values=values)

    with pytest.raises(UnknownValueError, match=r"test_real_values\.py:\d+: .*takes more than"):
        decide("auto")
    assert decide("real").values == "real"
    assert decide("none").warnings


def test_over_the_budget_a_program_that_decides_nothing_is_traced(monkeypatch):
    small_budgets(monkeypatch, 10**9, 1000)
    profile = trace(lambda: unknown().numpy().shape)
    assert profile.values == "in part"
    assert "unknown values are treated as 1" in profile.warnings[0]


def test_parameters_without_values_decide_nothing() -> None:
    model = nn.Linear(4, 4, device="meta")

    class Choosing(Parts):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(x)
            return output if output.mean() > 0 else output * 2

    with pytest.raises(UnknownValueError, match="computed from tensors on meta"):
        trace(Choosing(inner=model), torch.randn(2, 4), values="real")


def test_values_of_the_program_itself_are_never_written_to() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    before = [tensor.clone() for tensor in (*model.parameters(), x)]

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x.mul_(2)
        model(x).sum().backward()
        optimizer.step()
        assert not torch.equal(x, before[-1].clone())

    trace(program, values="real")
    assert all(map(torch.equal, (*model.parameters(), x), before))
    assert model.weight.grad is None


def test_what_outlives_a_trace_keeps_its_values() -> None:
    numbers = torch.arange(20_000.0)
    assert torch.equal(result_of(lambda: torch.arange(20_000.0) * 2, values="real"), numbers * 2)


def test_the_program_s_error_is_its_own() -> None:
    with pytest.raises(IndexError, match="index out of range"):
        trace(lambda: nn.Embedding(3, 2)(torch.tensor([5])), values="real")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8], ids=str)
def test_numbers_are_as_exact_as_in_kernels(dtype: torch.dtype) -> None:
    """They are not rounded to the dtype beside them, nor to the default one, before."""
    x = torch.arange(1, 100).to(dtype)

    def program() -> str:
        results = [x / 2.8284271, x * -0.3712, 0.37 / x, x.pow(1.2345678), x + 0.3, x.sum() / 0.3]
        results += [x.fmod(0.1234567), torch.div(x, 0.3712, rounding_mode="floor")]
        return str([result.tolist() for result in results])

    assert result_of(program, host="here") == program()


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match="values='all': expected one of 'auto', 'real', 'none'"):
        trace(nn.Linear(2, 2), torch.ones(1, 2), values="all")


def test_new_memory_is_filled_where_it_is_to_be(device: str) -> None:
    def program(device: str = "cpu") -> list[str]:
        torch.use_deterministic_algorithms(True)
        made = torch.empty(2, device=device), torch.ones(1, dtype=torch.int32, device=device)
        found = [str(one.resize_(3).tolist()) for one in made]
        torch.use_deterministic_algorithms(False)
        return found

    assert result_of(lambda: program(device), device=device, values="real") == program()


def test_what_is_made_like_a_tensor_on_meta_has_values(device: str) -> None:
    def program(device: str) -> list[float]:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
        model.to_empty(device=device)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        shape = torch.empty(3, 4, device="meta")
        skipped = torch.nn.utils.skip_init(torch.nn.Linear, 4, 4, device=device)
        torch.nn.init.eye_(skipped.weight)
        torch.nn.init.zeros_(skipped.bias)
        made = [
            torch.randn_like(shape, device=device),
            torch.full_like(shape, 3.0, device=device),
            shape.new_ones(3, 4, device=device),
            torch.empty_like(shape, device=device).uniform_(),
            torch.zeros_like(shape, device=device),
        ]
        return [model(skipped(one)).square().sum().item() for one in made]

    found = result_of(lambda: program(device), device=device)
    assert found == pytest.approx(program("cpu"), rel=1e-5)


def test_gradients_of_what_complex_numbers_are_multiplied_with() -> None:
    def gradients() -> list[list[float]]:
        found = []
        for made in (lambda x: x * 1j, lambda x: torch.exp(2j * x), lambda x: x / (1 + 1j)):
            x = torch.linspace(0.1, 1, 4, requires_grad=True)
            (made(x) * torch.complex(x, -x)).abs().square().sum().backward()
            found.append(x.grad.tolist())
        return found

    assert result_of(gradients, values="real") == [pytest.approx(real) for real in gradients()]


def test_a_printed_tensor_reads_as_torch_writes_it_and_takes_what_that_takes(device: str) -> None:
    written: list[str] = []

    def program(on: str = device) -> None:
        torch.manual_seed(0)
        weight = torch.randn(6, 7, device=on, requires_grad=True)
        product = weight * torch.tensor([1e-3, 1.0, 1e4, 2.0, float("nan"), 0.0, 5.0], device=on)
        lines = [product[:2], weight[0] * 1, product > 0, product.sum(), weight.half()[0, :4]]
        lines += [torch.tensor([], device=on), weight[:0].long()]
        written[:] = [*map(repr, lines), f"{weight.sum():.3f}", str(weight.detach()[0].long())]

    traced = trace(program, device=device, host="here", values="real")
    as_traced = list(written)
    measured = measure(lambda: program("cpu"))
    if device == "cpu":
        assert as_traced == written
        assert traced.figures() == measured.figures()
    else:  # where a line is broken depends on how long it is

        def without_breaks(line: str) -> str:
            return "".join(line.split()).replace(",device='cuda:0'", "")

        assert [*map(without_breaks, as_traced)] == [*map(without_breaks, written)]
