"""How long a trace with ``values="real"`` takes against the same step for real on the CPU.

    python -m benchmarks.real_values_time
    python -m benchmarks.real_values_time --published 'gpt2|resnet'   models of the zoo, too

    python -m benchmarks.real_values_time --decoder          a loop of tiny operators

Both run one after the other in each round, on one thread and in processor time; the table has the
median of the rounds' ratios. The first round, in which a trace finds what later ones remember, is
left out.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pytest_torchmem as torchmem
from benchmarks.conformance.report import machine
from benchmarks.isolation.sample import Named
from benchmarks.zoo import published
from pytest_torchmem.step.step import Step

Program = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Build = Callable[[], Program]


def perceptron() -> Program:
    """Return four wide linear layers, and 256 rows."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(256, 1024),), {}


def convolutions() -> Program:
    """Return blocks of convolution and batch norm, and 16 images."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 64), (64, 128), (128, 128)):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers), (torch.randn(16, 3, 32, 32),), {}


def encoder() -> Program:
    """Return four encoder layers, and eight sequences of 128."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return model, (torch.randn(8, 128, 256),), {}


def published_program(model: Named) -> Program:
    """Return a model of published width, and what it is trained on."""
    sample = next(published.samples(model))
    return sample.target, sample.args, dict(sample.kwargs)


class Decoder(nn.Module):
    """A GPT of a few wide with a cache of keys and values, which speculation crops."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(97, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width),
                    nn.Linear(width, 3 * width),
                    nn.Linear(width, width),
                    nn.Sequential(
                        nn.LayerNorm(width),
                        nn.Linear(width, 4 * width),
                        nn.GELU(),
                        nn.Linear(4 * width, width),
                    ),
                ]
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 97, bias=False))
        self.cache: list[Any] = [None] * layers

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the words that are not in the cache yet."""
        start = 0 if self.cache[0] is None else self.cache[0][0].shape[2]
        ids = ids[:, start:]
        x = self.words(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        blocks: Any = self.blocks
        for at, (norm, project, out, feed) in enumerate(blocks):
            query, key, value = project(norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            if self.cache[at] is not None:
                before = self.cache[at]
                key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
            self.cache[at] = key, value
            whole = key.shape[2]
            mask = torch.ones(ids.shape[1], whole, dtype=torch.bool).tril(whole - ids.shape[1])
            met = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + out(met.transpose(1, 2).flatten(2))
            x = x + feed(x)
        logits: torch.Tensor = self.head(x)
        return logits


@torch.no_grad()
def decode(target: Decoder, draft: Decoder, length: int = 40, guesses: int = 4) -> torch.Tensor:
    """Return words that one model guesses and the other checks, which decides how many stay."""
    for model in (target, draft):
        model.cache = [None] * len(model.cache)
    ids = torch.randint(97, (1, 8))
    while ids.shape[1] < length:
        guessed = ids
        for _ in range(guesses):
            guessed = torch.cat([guessed, draft(guessed)[:, -1].argmax(-1, keepdim=True)], 1)
        wanted = target(guessed)[:, -guesses - 1 :].argmax(-1)
        same = 0
        while same < guesses and wanted[0, same] == guessed[0, ids.shape[1] + same]:
            same += 1
        ids = torch.cat([guessed[:, : ids.shape[1] + same], wanted[:, same : same + 1]], 1)
        for model in (target, draft):
            kept = ids.shape[1] - 1
            model.cache = [(key[:, :, :kept], value[:, :, :kept]) for key, value in model.cache]
    return ids


class Counted(TorchDispatchMode):
    """Counts operators."""

    number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one."""
        self.number += 1
        return function(*args, **(kwargs or {}))


def decoding(rounds: int) -> list[tuple[str, ...]]:
    """Return rows of what an operator of ``decode`` takes for real and traced, by device."""
    torch.manual_seed(0)
    run = partial(decode, Decoder(64, 4), Decoder(32, 2))
    counted = Counted()
    with counted:
        run()
    rows = []
    for device in ("cpu", "cuda"):
        traces = [_seconds(partial(torchmem.trace, run, device=device)) for _ in range(rounds + 1)]
        real = min(_seconds(run) for _ in range(rounds))
        found = [real, min(traces[1:]), statistics.median(traces[1:])]
        each = [f"{1e6 * seconds / counted.number:.1f}" for seconds in found]
        rows.append((f"fake {device}", f"{counted.number:,}", *each))
    return rows


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def ratios(build: Build, rounds: int) -> tuple[float, list[float]]:
    """Return the median seconds of the real step, and each round's ratio to it."""
    torch.manual_seed(0)
    model, args, kwargs = build()
    whole = Step(optimizer=torch.optim.AdamW)

    def step() -> None:
        model.zero_grad()
        whole.run(model, args, kwargs)

    def traced() -> None:
        torchmem.trace(
            model, *args, device="cpu", optimizer=torch.optim.AdamW, values="real", **kwargs
        )

    found = []
    for _ in range(rounds + 1):
        real = _seconds(step)
        found.append((real, _seconds(traced) / real))
    return statistics.median(real for real, _ in found[1:]), [ratio for _, ratio in found[1:]]


def main() -> None:
    """Print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--published", help="regular expression for models of benchmarks.zoo")
    parser.add_argument("--decoder", action="store_true", help="microseconds of tiny operators")
    options = parser.parse_args()
    rounds = options.rounds
    programs: dict[str, Build] = {one.__name__: one for one in (perceptron, convolutions, encoder)}
    if options.published:
        for model in published.models(options.published):
            programs[model.case] = partial(published_program, model)
    torch.set_num_threads(1)
    if options.decoder:
        headers: tuple[str, ...] = ("speculation", "operators", "real µs", "least µs", "median µs")
        print(tabulate(decoding(rounds), headers=headers, disable_numparse=True))
        print(machine())
        return
    rows = []
    for name, build in programs.items():
        real, found = ratios(build, rounds)
        middle = statistics.median(found)
        shares = (f"{one:.2f}" for one in (middle, min(found), max(found)))
        rows.append((name, f"{1e3 * real:.0f} ms", *shares))
    headers = ("step", "for real", 'values="real"', "least", "most")
    print(tabulate(rows, headers=headers))
    print(machine())


if __name__ == "__main__":
    main()
