"""Distributed training steps, each a function that runs unchanged in real processes and in a trace.

A program is called in a process that knows its place from ``torchrun``'s variables, and begins with
``start``. Models are small: what is compared are bytes, not sizes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, TOKENS, VOCABULARY, BATCH = 64, 4, 32, 256, 4

Program = Callable[[], Any]


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self._run, x, use_reentrant=False)
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        shape = (*x.shape[:2], HEADS, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self, layers: int = 3, *, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(checkpointed) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Perceptron(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Perceptrons(nn.Module):
    """A language model without attention."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Perceptron() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class LoRA(nn.Module):
    """A linear layer that is frozen, with a trained one of low rank beside it."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def start(device: str = "cpu") -> Any:
    """Join the group of all processes; return their mesh."""
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    return init_device_mesh(device, (dist.get_world_size(),))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 2,
    device: str = "cpu",
    accumulate: int = 1,
    after_backward: Callable[[], Any] = lambda: None,
    sync: Callable[[bool], Any] = lambda last: None,
) -> None:
    """Run training steps on tokens of this process."""
    for _ in range(steps):
        for part in range(accumulate):
            sync(part == accumulate - 1)
            tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), device=device)
            logits = model(tokens)
            functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            del logits
        after_backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model: Any, **arguments: Any) -> Any:
    """Shard each layer, and the rest, as torchtitan does."""
    for layer in model.layers:
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def fsdp(device: str = "cpu") -> None:
    """``fully_shard`` with AdamW."""
    model = shard(Decoder().to(device), mesh=start(device))
    train(model, torch.optim.AdamW(model.parameters()), device=device)


def fsdp_meta(device: str = "cpu") -> None:
    """Made on ``meta``, then on the device."""
    mesh = start(device)
    with torch.device("meta"):
        model = Decoder()
    shard(model, mesh=mesh).to_empty(device=device)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    train(model, torch.optim.SGD(model.parameters(), momentum=0.9), device=device)


def fsdp_mixed(device: str = "cpu") -> None:
    """Mixed precision, clipped gradients, parameters kept after the forward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = start(device)
    model = Decoder().to(device)
    shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    train(model, torch.optim.AdamW(model.parameters()), device=device, after_backward=clip)


def fsdp_checkpointed(device: str = "cpu") -> None:
    """Checkpointed layers and tied embeddings."""
    mesh = start(device)
    model = shard(Decoder(tied=True, checkpointed=True).to(device), mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters()), device=device)


def fsdp_accumulated(device: str = "cpu") -> None:
    """Gradients of two batches, reduced with the second."""
    model: Any = shard(Decoder().to(device), mesh=start(device))
    sync = model.set_requires_gradient_sync
    train(model, torch.optim.AdamW(model.parameters()), device=device, accumulate=2, sync=sync)


def fsdp_lora(device: str = "cpu") -> None:
    """Frozen weights, and trained ones of low rank."""
    mesh = start(device)
    model = Decoder().requires_grad_(False)
    layer: Any
    for layer in model.layers:
        layer.qkv, layer.out = LoRA(layer.qkv), LoRA(layer.out)
    shard(model.to(device), mesh=mesh)
    trained = [one for one in model.parameters() if one.requires_grad]
    train(model, torch.optim.AdamW(trained), device=device)


def fsdp_muon(device: str = "cpu") -> None:
    """Matrices in Muon, whose products gather them."""
    model = shard(Perceptrons().to(device), mesh=start(device))
    matrices = [one for one in model.parameters() if one.ndim == 2]
    train(model, torch.optim.Muon(matrices), device=device)


def _pipeline(device: str, kind: Any, chunks: int) -> None:
    start(device)
    rank, size = dist.get_rank(), dist.get_world_size()
    places = range(rank, chunks * size, size)
    layers = nn.ModuleList(Perceptron().to(device) for _ in places)
    stages = [
        PipelineStage(layer, place, chunks * size, torch.device(device))
        for layer, place in zip(layers, places, strict=True)
    ]
    schedule = kind(stages if chunks > 1 else stages[0], 4, loss_fn=functional.mse_loss)
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(2):
        batch = torch.randn(4 * BATCH, TOKENS, WIDTH, device=device)
        last = {"target": batch, "losses": []} if rank == size - 1 else {}
        schedule.step(*([batch] if rank == 0 else []), **last)
        optimizer.step()
        optimizer.zero_grad()


def pipeline(device: str = "cpu") -> None:
    """A stage of a pipeline, one forward and one backward in turn."""
    _pipeline(device, Schedule1F1B, 1)


def pipeline_interleaved(device: str = "cpu") -> None:
    """Two stages in each process, and gradients of weights when there is time for them."""
    _pipeline(device, ScheduleInterleavedZeroBubble, 2)


def ddp(device: str = "cpu") -> None:
    """``DistributedDataParallel`` with AdamW."""
    start(device)
    model = DistributedDataParallel(Decoder().to(device))
    train(model, torch.optim.AdamW(model.parameters()), device=device)


def ddp_views(device: str = "cpu") -> None:
    """Gradients as views of small buckets, in a static graph, checkpointed."""
    start(device)
    model = DistributedDataParallel(
        Decoder(checkpointed=True).to(device),
        bucket_cap_mb=0.1,
        gradient_as_bucket_view=True,
        static_graph=True,
    )
    train(model, torch.optim.SGD(model.parameters(), momentum=0.9), device=device)


def ddp_accumulated(device: str = "cpu") -> None:
    """Gradients of two batches, reduced with the second; a parameter that is not used."""
    start(device)
    inner = Decoder(tied=True).to(device)
    inner.unused = nn.Linear(WIDTH, WIDTH).to(device)
    model = DistributedDataParallel(inner, find_unused_parameters=True, bucket_cap_mb=0.1)

    def sync(last: bool) -> None:
        model.require_backward_grad_sync = last

    train(model, torch.optim.AdamW(model.parameters()), device=device, accumulate=2, sync=sync)


def _ddp_hooked(device: str, state: Any, hook: Callable[..., Any]) -> None:
    model = DistributedDataParallel(Decoder().to(device))
    model.register_comm_hook(state, hook)
    train(model, torch.optim.AdamW(model.parameters()), steps=4, device=device)


def ddp_half(device: str = "cpu") -> None:
    """Gradients that are sent in half precision."""
    start(device)
    _ddp_hooked(device, None, default_hooks.fp16_compress_hook)


def ddp_power(device: str = "cpu") -> None:
    """Gradients that are sent as products of low rank."""
    start(device)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    _ddp_hooked(device, state, powerSGD_hook.powerSGD_hook)


def ddp_power_half(device: str = "cpu") -> None:
    """The same, in half precision."""
    start(device)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    _ddp_hooked(device, state, hook)


def tensor_parallel(device: str = "cpu") -> None:
    """Linear layers that are split by their columns and rows."""
    mesh = start(device)
    model = Perceptrons().to(device)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(model, torch.optim.AdamW(model.parameters(), foreach=False), device=device)


def sequence_parallel(device: str = "cpu", sharded: bool = False) -> None:
    """Activations that are split along the sequence, and the loss by classes."""
    start(device)
    shape, names = (dist.get_world_size() // 2, 2), ("data", "tensor")
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    model = Perceptrons().to(device)
    whole: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh["tensor"], whole)
    for layer in model.layers:
        parts: dict[str, Any] = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh["tensor"], parts)
    if sharded:
        shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), device=device)
        with loss_parallel():
            logits = model(tokens).flatten(0, 1)
            functional.cross_entropy(logits, tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def sharded_sequence_parallel(device: str = "cpu") -> None:
    """The same, and ``fully_shard`` over the other dimension of the mesh."""
    sequence_parallel(device, sharded=True)


_FSDP = (fsdp, fsdp_meta, fsdp_mixed, fsdp_checkpointed, fsdp_accumulated, fsdp_lora, fsdp_muon)
_DDP = (ddp, ddp_views, ddp_accumulated, ddp_half, ddp_power, ddp_power_half)
_TENSOR = (tensor_parallel, sequence_parallel, sharded_sequence_parallel)
PROGRAMS: dict[str, Program] = {
    one.__name__: one for one in (*_FSDP, pipeline, pipeline_interleaved, *_DDP, *_TENSOR)
}
