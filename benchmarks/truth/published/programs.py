"""Programs that others recorded, written out: what is asked of the device is the same, in order.

What a function's variables hold is alive until it returns, so they are variables here where they
are in the recorded program.

The language model is the one of Stanford's course CS336, as its staff publishes it: a decoder with
normalisation before each part, rotary positions and a gated feed-forward layer, in which every
product is an ``einsum``. Optimizer and loss are the course's, too.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

MARK = 7777
"""Bytes of a request that no program makes otherwise."""

Program = Callable[[], None]


@contextmanager
def recording() -> Iterator[None]:
    """Mark where a recording begins and ends, by a request of ``MARK`` bytes each."""
    torch.empty(MARK, dtype=torch.uint8, device="cuda")
    yield
    torch.empty(MARK, dtype=torch.uint8, device="cuda")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a language model and of its batch."""

    width: int
    inner: int
    layers: int
    heads: int
    length: int
    batch: int = 4
    vocabulary: int = 10_000


def small(length: int, batch: int = 4) -> Sizes:
    """Return the sizes that the course calls small."""
    return Sizes(768, 3072, 12, 12, length, batch)


class Product(nn.Module):
    """A linear layer without bias; float32[..., inner] to float32[..., outer]."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsi,oi->bso", x, self.weight)


class Words(nn.Module):
    """An embedding that is indexed; int64[...] to float32[..., width]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class Norm(nn.Module):
    """Root mean square normalisation, an operator at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input, in its type."""
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    """Rotary positions; one module for all layers."""

    table: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length), 10_000 ** -(torch.arange(0, width, 2) / width))
        table = torch.stack((angles.cos(), angles.sin()))
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return float32[batch, heads, sequence, width], rotated."""
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        turned = torch.cat((turned_first, turned_second), dim=-1)
        return turned  # noqa: RET504 - the order in which the three go


class Attention(nn.Module):
    """Causal attention with its scores and probabilities written out."""

    def __init__(self, sizes: Sizes, rotary: Rotary) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query = Product(sizes.width, sizes.width)
        self.key = Product(sizes.width, sizes.width)
        self.value = Product(sizes.width, sizes.width)
        self.outer = Product(sizes.width, sizes.width)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        """Return float32[batch, sequence, width]."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value)
        )
        query = self.rotary(query)
        key = self.rotary(key)
        positions = torch.arange(x.size(-2), device=x.device)
        mask = positions[:, None] >= positions[None, :]
        mixed = _attend(query, key, value, mask[None])
        mixed = mixed.transpose(1, 2).flatten(-2)
        outputs: Tensor = self.outer(mixed)
        return outputs


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(key.size(-1))
    scores = torch.where(mask, scores, float("-inf"))
    probabilities = _softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", probabilities, value)


def _softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


class Gated(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = Product(sizes.width, sizes.inner)
        self.outer = Product(sizes.inner, sizes.width)
        self.up = Product(sizes.width, sizes.inner)

    def forward(self, x: Tensor) -> Tensor:
        """Return float32[batch, sequence, width]."""
        return cast(Tensor, self.outer(_silu(self.gate(x)) * self.up(x)))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a shortcut."""

    def __init__(self, sizes: Sizes, rotary: Rotary) -> None:
        super().__init__()
        self.attention, self.gated = Attention(sizes, rotary), Gated(sizes)
        self.first, self.second = Norm(sizes.width), Norm(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return float32[batch, sequence, width]."""
        mixed: Tensor = self.attention(self.first(x))
        between = x + mixed
        further = self.gated(self.second(between))
        outputs: Tensor = between + further
        return outputs


class LanguageModel(nn.Module):
    """int64[batch, sequence] to logits float32[batch, sequence, vocabulary]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = Words(sizes.vocabulary, sizes.width)
        self.rotary = Rotary(sizes.length, sizes.width // sizes.heads)
        self.layers = nn.ModuleList(Layer(sizes, self.rotary) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)
        self.head = Product(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.words(tokens)
        x = words
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        return logits


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, an operator at a time."""
    likelihoods = -_log_softmax(logits)
    return torch.mean(torch.gather(likelihoods, -1, targets.unsqueeze(-1)))


def _log_softmax(x: Tensor) -> Tensor:
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class PlainAdamW(torch.optim.Optimizer):
    """AdamW, a parameter and an operator at a time, with new states in every step."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            rate, (first, second), decay = group["lr"], group["betas"], group["decay"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if gradient is None:
                    continue
                parameter -= rate * decay * parameter
                mean = state.get("mean", torch.zeros_like(gradient))
                square = state.get("square", torch.zeros_like(gradient))
                mean_after = first * mean + (1 - first) * gradient
                square_after = second * square + (1 - second) * torch.square(gradient)
                parameter -= rate * mean_after / (torch.sqrt(square_after) + 1e-8)
                state["mean"], state["square"] = mean_after, square_after


def _autocast(enabled: bool) -> AbstractContextManager[object]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if enabled else nullcontext()


def _tokens(*shape: int) -> Tensor:
    return torch.randint(0, 10_000, shape, dtype=torch.long, device="cuda")


def inference(sizes: Sizes, autocast: bool = False, before: int = 5) -> Program:
    """Return a program: ``before`` forwards in inference mode, and one that was recorded."""

    def program() -> None:
        model = LanguageModel(sizes).to("cuda").eval()
        batches = _tokens(before, sizes.batch, sizes.length)
        recorded = _tokens(1, sizes.batch, sizes.length)
        with torch.inference_mode():
            for batch in batches:
                with _autocast(autocast):
                    model(batch)
            with recording(), _autocast(autocast):
                model(recorded[0])

    return program


def training(sizes: Sizes, autocast: bool = False, before: int = 5) -> Program:
    """Return a program: ``before`` training steps, and one that was recorded."""

    def program() -> None:
        model = LanguageModel(sizes).to("cuda")
        optimizer = PlainAdamW(model.parameters())
        shape = (sizes.batch, sizes.length)
        batches, recorded = _tokens(before, *shape), _tokens(1, *shape)
        targets, recorded_targets = _tokens(before, *shape), _tokens(1, *shape)
        logits = loss = None
        for batch, target in zip(batches, targets, strict=True):
            with _autocast(autocast):
                logits = model(batch)
                loss = _loss(logits, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del logits, loss
        with recording():
            with _autocast(autocast):
                logits = model(recorded[0])
                loss = _loss(logits, recorded_targets[0])
            loss.backward()
            optimizer.step()

    return program


def accumulating(sizes: Sizes, before: int = 5) -> Program:
    """Return a program: forward and backward over and over, the last time recorded."""

    def program() -> None:
        model = LanguageModel(sizes).to("cuda")
        batch = _tokens(sizes.batch, sizes.length)
        targets = _tokens(sizes.batch, sizes.length)
        logits = loss = None
        for index in range(before + 1):
            with recording() if index == before else nullcontext():
                logits = model(batch)
                loss = _loss(logits, targets)
                loss.backward()

    return program


def evaluations(sizes: Sizes, times: int = 5) -> Program:
    """Return a program: ``times`` forwards without gradients, all of them recorded."""

    def program() -> None:
        model = LanguageModel(sizes).to("cuda")
        batch = _tokens(sizes.batch, sizes.length)
        with recording(), torch.no_grad():
            for _ in range(times):
                model(batch)

    return program


def forwards(
    sizes: Sizes, autocast: bool = False, gradients: bool = True, before: int = 5
) -> Program:
    """Return a program: ``before`` forwards, and one that was recorded."""

    def program() -> None:
        model = LanguageModel(sizes).to("cuda")
        batch = torch.zeros(sizes.batch, sizes.length, dtype=torch.long).to("cuda")
        targets = torch.zeros(sizes.batch, sizes.length, dtype=torch.long).to("cuda")

        def step() -> None:
            with torch.set_grad_enabled(gradients), _autocast(autocast):
                logits = model(batch)
            del logits

        for _ in range(before):
            step()
        with recording():
            step()
        del targets

    return program


def linear(with_gradients: bool) -> Program:
    """Return a program: one wide linear layer, built and run three times, all of it recorded."""

    def program() -> None:
        with recording():
            layer = nn.Linear(10_000, 50_000, device="cuda")
            outputs = None
            with nullcontext() if with_gradients else torch.no_grad():
                for _ in range(3):
                    inputs = torch.randn(5_000, 10_000, device="cuda")
                    outputs = layer(inputs)
        del outputs

    return program


def cell(width: int = 16, inner: int = 64, side: int = 320) -> Program:
    """Return a program: one step of a cellular automaton of convolutions, without gradients.

    Of the octree automata of ``HugePandaCoder/octree-nca-groupeq``: a depthwise convolution with
    reflected padding, two of 1 by 1, and an update where a random mask says so.
    """

    def program() -> None:
        with torch.no_grad():
            near = nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect", groups=width)
            near = near.cuda()
            first = nn.Conv2d(2 * width, inner, 1).cuda()
            second = nn.Conv2d(inner, width - 3, 1, bias=False).cuda()
            image = torch.randn(1, 3, side, side)
            with recording():
                state = torch.zeros(1, width, side, side, device="cuda")
                image = image.to("cuda")
                x = near(state)
                x = torch.cat((state, x), dim=1)
                x = first(x)
                x = torch.relu(x)
                x = second(x)
                mask = torch.rand(1, 1, side, side, device="cuda")
                x = x * mask
                update = state[:, 3:] + x
                state = torch.cat((image, update), dim=1)

    return program
