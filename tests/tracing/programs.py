"""Small models and programs that the tests of the profiler share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import MemoryProfile
from tests.modules import Parts


class Tied(nn.Module):
    """A language model's ends: one storage for both, and a buffer no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(100, 32), nn.Linear(32, 100, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(32), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.embedding(ids) * self.scale)


class Checkpointed(Parts):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpointed(reentrant: bool) -> nn.Module:
    layers = [(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    blocks = nn.ModuleList(nn.Sequential(*block) for block in layers)
    return Checkpointed(blocks=blocks, reentrant=reentrant)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left * right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        return gradients[0] * right, gradients[0] * left


class First(Parts):
    """A module that returns the first of what another returns."""

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


def perceptron() -> nn.Module:
    hidden = nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(0.1)
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def recurrent(layers: int = 1, **options: Any) -> nn.Module:
    return First(module=nn.RNN(16, 32, layers, **options))


def weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model.register_forward_hook(lambda module, args, output: output * 2)
    model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (perceptron, lambda: torch.randn(32, 64)),
    "encoder": (encoder, lambda: torch.randn(4, 16, 64)),
    "tied": (Tied, lambda: torch.randint(0, 100, (4, 7))),
    "weight norm": (weight_norm, lambda: torch.randn(16, 32)),
    "hooks": (hooked, lambda: torch.randn(16, 32)),
    "checkpoint": (lambda: checkpointed(False), lambda: torch.randn(128, 64)),
    "reentrant": (lambda: checkpointed(True), lambda: torch.randn(128, 64).requires_grad_()),
    "two-layer RNN": (lambda: recurrent(2, batch_first=True), lambda: torch.randn(4, 5, 16)),
    "RNN": (recurrent, lambda: torch.randn(5, 4, 16)),
}


def used_three_times() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    y = x * 1.0
    (y + y * 2.0 + y * 3.0).sum().backward()


def multiplied_by_itself() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    y = x.exp()
    (y * y).sum().backward()


def custom_function() -> None:
    left, right = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    Multiply.apply(left, right).sum().backward()


def gradient_kept_by_a_hook() -> None:
    kept = []
    x = torch.randn(32, 32, requires_grad=True)
    y = x.exp()
    first, second = y.sin(), y.cos()
    y.register_hook(kept.append)
    (first + second).sum().backward()


def retained_gradient() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    y = x.exp()
    y.retain_grad()
    (y.sin() + y.cos()).sum().backward()


def twice_through_one_graph() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    loss = (x.exp().sin() + x.cos()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def second_order() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
    gradient.exp().sum().backward()


def gradient_of_an_input_only() -> None:
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    torch.autograd.grad((x @ weight).exp().sum(), x)


def views_and_writes() -> None:
    x = torch.randn(16, 64, requires_grad=True)
    y = x.sin()
    y[:, :8].mul_(2.0)
    parts = y.view(4, 4, 64).transpose(0, 1).split(32, dim=2)
    (parts[0].contiguous().sum() + parts[1].sum()).backward()


def expanded_gradient() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    x.exp().mean(dim=0).expand(8, 32).sum().backward()


def without_gradients() -> None:
    model = perceptron()
    with torch.no_grad():
        model(torch.randn(16, 64))


def inference_mode() -> None:
    model = encoder().eval()
    with torch.inference_mode():
        model(torch.randn(2, 8, 64)).softmax(-1)


def evaluation_fast_path() -> None:
    model = encoder().eval()
    with torch.no_grad():
        model(torch.randn(2, 8, 64))


def function_transforms() -> None:
    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return (weight * x).sum()

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(torch.randn(64), torch.randn(8, 64))


def sparse_gradients() -> None:
    embedding = nn.Embedding(1000, 16, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
    ids = torch.arange(20).view(4, 5)
    for _ in range(2):
        optimizer.zero_grad()
        (embedding(ids).sum() + embedding(ids[:2]).exp().sum()).backward()
        optimizer.step()


def sparse_gradients_add_up() -> None:
    embedding = nn.Embedding(1000, 16, sparse=True)
    for _ in range(2):
        embedding(torch.arange(20)).sum().backward()


def sparse_gradients_of_bags() -> None:
    for mode in ("sum", "mean"):
        embedding = nn.EmbeddingBag(1000, 16, mode=mode, sparse=True)
        for _ in range(2):
            embedding(torch.arange(20), torch.tensor([0, 7, 9])).sum().backward()


def packed_sequences() -> None:
    recurrent = nn.GRU(8, 16, batch_first=True)
    x, lengths = torch.randn(3, 5, 8), torch.tensor([5, 3, 2])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    output, lengths = nn.utils.rnn.pad_packed_sequence(recurrent(packed)[0], batch_first=True)
    assert lengths.tolist() == [5, 3, 2]
    output.sum().backward()


def packed_sequences_alone() -> None:
    """What packing copies is all that is alive with its result."""
    lengths = torch.tensor([40, 31, 31, 7, 1])
    for batch_first in (True, False):
        x = torch.randn(5, 40, 64) if batch_first else torch.randn(40, 5, 64)
        nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first)


def several_optimizer_steps() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(64, 64)).exp().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def complex_numbers() -> None:
    x = torch.randn(500, requires_grad=True)
    turned = torch.exp(1j * x) + (x - 2j) / 3j
    assert turned.dtype is (x.sum() * 1j).dtype is torch.complex64
    (turned * 0.5).abs().sum().backward()
    assert x.grad.dtype is torch.float32


def storages_by_themselves() -> None:
    """Storages that Python makes count from where they are made, not from the beginning."""
    x = torch.randn(500)
    del x
    sent = torch.UntypedStorage.from_buffer(bytes(200), dtype=torch.uint8)
    received = torch.empty(0, dtype=torch.uint8).set_(sent) + 1
    y = torch.randn(300)
    del sent, received, y
    unused, one = torch.UntypedStorage(800), torch.UntypedStorage(400)
    copied = torch.FloatTensor().set_(torch.zeros(60).untyped_storage().clone())
    del unused, copied
    assert torch.FloatTensor().set_(one).fill_(2).sum() == 200
    torch.randn(330)


PROGRAMS = (
    *(storages_by_themselves, complex_numbers, sparse_gradients, sparse_gradients_add_up),
    *(sparse_gradients_of_bags, packed_sequences, packed_sequences_alone, several_optimizer_steps),
    *(used_three_times, multiplied_by_itself, custom_function, gradient_kept_by_a_hook),
    *(retained_gradient, twice_through_one_graph, second_order, gradient_of_an_input_only),
    *(views_and_writes, expanded_gradient, without_gradients, inference_mode),
    *(evaluation_fast_path, function_transforms),
)


def differences(traced: MemoryProfile, measured: MemoryProfile) -> dict[str, int]:
    """Return traced minus measured bytes of every figure that differs."""
    ours, real = traced.figures(), measured.figures()
    ours.pop("host_peak", None)  # memory of others, which torch's profiler does not see
    differ = [name for name in {*ours, *real} if ours.get(name) != real.get(name)]
    return {name: ours.get(name, 0) - real.get(name, 0) for name in differ}
