"""Ranks of torchtitan's published steps of Llama 3.1, beside what they took on H100s.

    python -m benchmarks.torchtitan_llama [NAME...] [--ranks RANK...] [--today]

The published figures are those of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md
(``reserved_bytes.all.peak`` in GiB, the most of all GPUs; HBM2e H100s of 96 GB, nightly torch of
2024-12-23). The steps are those of torchtitan's commit 9dec370 with train_configs/llama3_8b.toml,
llama3_70b.toml and llama3_405b.toml: tensor and sequence parallelism with a loss by classes,
checkpoints, ``fully_shard`` of each layer (parameters in bfloat16, gradients reduced in float32),
``foreach`` AdamW, layers that are compiled, linear layers in Float8 (which needs torchao), and
asynchronous tensor parallelism, as published. "405B-512-one-stage", a step without
a pipeline, was not: its time and resident memory are of interest.
"""

import argparse
import math
import resource
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pytest_torchmem import trace

TOKENS, VOCABULARY, STEPS = 8192, 128256, 3
_REUSE, _PUT_TOGETHER = "should_reuse_buffer", "_maybe_view_chunk_cat"


@dataclass(frozen=True)
class Size:
    """Sizes of a model (torchtitan/models/llama/__init__.py)."""

    width: int
    hidden: int
    heads: int
    layers: int
    keys: int = 8

    @property
    def head(self) -> int:
        """Channels of a head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Row:
    """One row of the published tables; ``ranks`` are those that may take most."""

    size: Size
    gpus: int
    batch: int
    published: float
    """GiB."""
    tensor: int = 1
    stages: int = 1
    interleaved: bool = False
    full: bool = False
    """Whether layers are checkpointed whole, rather than by operators."""
    ranks: tuple[int, ...] = (0,)
    compiled: bool = False
    """Whether each layer is compiled (torchtitan's ``apply_compile``)."""
    float8: bool = False
    """Whether linear layers are torchao's, whose weights are gathered in Float8."""
    tokens: int = TOKENS
    """The length of a sequence."""
    context: int = 1
    """How many GPUs share a sequence (``context_parallel``)."""
    expandable: bool = False
    """Whether segments of the caching allocator grow, as run_llama_train.sh asks for."""
    asynchronous: bool = False
    """Whether Inductor joins collectives and products (``enable_async_tensor_parallel``)."""

    @property
    def sharded(self) -> int:
        """How many GPUs ``fully_shard`` splits parameters over, those of a sequence aside.

        Where it is one, torchtitan's ``Float8Handler`` does not gather weights in Float8.
        """
        return self.gpus // self.stages // self.context // self.tensor


SMALL = Size(4096, 14336, 32, 32)
MIDDLE = Size(8192, 28672, 64, 80)
LARGE = Size(16384, 53248, 128, 126)
_SHARDED = Row(MIDDLE, 256, 16, 71.9, 8, full=True, compiled=True, float8=True)
_STAGES = replace(_SHARDED, size=LARGE, gpus=512, batch=32, published=82.5, stages=8)
_STAGES = replace(_STAGES, ranks=(0, 448), asynchronous=True)
_INTERLEAVED = replace(_STAGES, published=72.7, interleaved=True)
_LONG = replace(_STAGES, batch=8, published=75.3, tokens=32768, expandable=True)
_LONG_8B = Row(SMALL, 8, 1, 83.9, full=True, compiled=True, float8=True, tokens=32768)
ROWS = {
    "8B-8-eager": Row(SMALL, 8, 2, 82.4),
    "8B-8-compiled": Row(SMALL, 8, 2, 77.0, compiled=True),
    "8B-8": Row(SMALL, 8, 2, 76.8, compiled=True, float8=True),
    "8B-8-long": _LONG_8B,
    "8B-8-context-2": replace(_LONG_8B, published=84.2, tokens=2 * 32768, context=2),
    "8B-8-context-4": replace(_LONG_8B, published=84.0, tokens=4 * 32768, context=4),
    "8B-8-context-8": replace(_LONG_8B, published=84.5, tokens=8 * 32768, context=8),
    "8B-128-eager": Row(SMALL, 128, 2, 67.0),
    "8B-128-compiled": Row(SMALL, 128, 2, 62.0, compiled=True),
    "8B-128": Row(SMALL, 128, 2, 61.8, compiled=True, float8=True),
    "70B-256": _SHARDED,
    "70B-256-asynchronous": replace(_SHARDED, published=67.6, asynchronous=True),
    "405B-512-one-stage": Row(LARGE, 512, 1, math.nan, 8, full=True),
    "405B-512": _STAGES,
    "405B-512-long": _LONG,
    "405B-512-context-2": replace(_LONG, published=75.9, tokens=2 * 32768, context=2),
    "405B-512-context-4": replace(_LONG, published=77.1, tokens=4 * 32768, context=4),
    "405B-512-context-8": replace(_LONG, published=84.9, tokens=8 * 32768, context=8),
    "405B-512-interleaved": _INTERLEAVED,
}
"""Tables 1 to 6."""

_aten = torch.ops.aten
_SAVED = {
    _aten.mm.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    _aten.abs.default,
    _aten.max.default,
}


class Norm(nn.Module):
    """A root-mean-square norm of operators, as torchtitan's ``rmsnorm`` was."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).type_as(x) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of channels by the position of their token."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, : x.shape[1], None]).flatten(3).type_as(x)


def repeat(x: Tensor, times: int) -> Tensor:
    """Repeat the heads of keys or values."""
    shape = (*x.shape[:3], times, x.shape[3])
    return x[:, :, :, None].expand(shape).reshape(*x.shape[:2], -1, x.shape[3])


class Attention(nn.Module):
    """Attention with fewer heads for keys than for queries."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        keys = size.keys * size.head
        self.wq, self.wo = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(size.width, keys, bias=False) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        size, linears = self.size, (self.wq, self.wk, self.wv)
        parts = [linear(x).view(*x.shape[:2], -1, size.head) for linear in linears]
        q, k, v = rotate(parts[0], angles), rotate(parts[1], angles), parts[2]
        times = size.heads // size.keys
        k, v = repeat(k, times), repeat(v, times)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(found.transpose(1, 2).contiguous().view(*x.shape[:2], -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """One layer of Llama."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(size.width), Norm(size.width)
        self.attention, self.feed_forward = Attention(size), FeedForward(size)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Some layers of Llama 3.1, with what stands before the first and after the last."""

    def __init__(self, row: Row, layers: Iterable[int]) -> None:
        super().__init__()
        own, size = list(layers), row.size
        first, last = own[0] == 0, own[-1] == size.layers - 1
        self.tok_embeddings = nn.Embedding(VOCABULARY, size.width) if first else None
        angles = torch.empty(row.tokens, size.head // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles)
        self.layers = nn.ModuleList(Layer(size) for _ in own)
        self.norm = Norm(size.width) if last else None
        self.output = nn.Linear(size.width, VOCABULARY, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x, self.angles)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)


def split_tensors(model: Any, mesh: Any, *, float8: bool) -> None:
    """Do what torchtitan's ``apply_tp`` does."""
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    there = {name: style for name, style in plan.items() if getattr(model, name) is not None}
    parallelize_module(model, mesh, there)
    column, row, prepare = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    if float8:
        parallel = import_module("torchao.float8.float8_tensor_parallel")
        column, row = parallel.Float8ColwiseParallel, parallel.Float8RowwiseParallel
        prepare = parallel.PrepareFloat8ModuleInput
    one, both = (Shard(1),), (Shard(1), None)
    for layer in model.layers:
        styles: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": prepare(input_layouts=both, desired_input_layouts=(Replicate(), None)),
            "attention.wo": row(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": prepare(input_layouts=one, desired_input_layouts=(Replicate(),)),
            "feed_forward.w2": row(output_layouts=Shard(1)),
        }
        columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1")
        styles |= {name: column() for name in (*columns, "feed_forward.w3")}
        parallelize_module(layer, mesh, styles)


def _contexts() -> Any:
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        product = operator is _aten.mm.default
        products[context.is_recompute] += product
        second = product and products[context.is_recompute] % 2 == 0
        saves = operator in _SAVED and not second
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def parallelize(model: Any, row: Row, mesh: Any) -> None:
    """Do what torchtitan's ``parallelize_llama`` does."""
    if row.float8:
        torchao = import_module("torchao.float8")
        torchao.convert_to_float8_training(
            model,
            config=torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=row.sharded > 1),
            module_filter_fn=lambda _, name: name != "output",
        )
    if row.tensor > 1:
        split_tensors(model, mesh["tp"], float8=row.float8)
    if row.asynchronous:
        symmetric = import_module("torch.distributed._symmetric_memory")
        symmetric.enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
    selective: dict[str, Any] = {} if row.full else {"context_fn": _contexts}
    for index, layer in enumerate(model.layers):
        wrapped = checkpoint_wrapper(layer, preserve_rng_state=False, **selective)
        model.layers[index] = torch.compile(wrapped, fullgraph=True) if row.compiled else wrapped
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = {"mesh": mesh["dp_cp"], "mp_policy": policy}
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        fully_shard(layer, **shard, reshard_after_forward=row.stages == 1 and index != last)
    # The torch of then kept the parameters of the root from forward to backward whatever was asked.
    fully_shard(model, **shard, reshard_after_forward=False)


def stage_layers(size: Size, stages: int) -> list[range]:
    """Return which layers each stage has (torchtitan's ``generate_split_points``)."""
    each, more = divmod(size.layers, stages)
    ends = [each]
    for _ in range(stages - 2):
        ends.append(ends[-1] + each + (more > 0))
        more -= more > 0
    return [range(begin, end) for begin, end in zip([0, *ends], [*ends, size.layers], strict=True)]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss as torchtitan computes it."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Stage(PipelineStage):
    """A stage that has reduced its gradients does no more, as in torch 2.6.

    torch/distributed/pipelining/stage.py of then, ``run_post_backward``, did not end the backward
    of ``fully_shard`` (``_root_post_backward_final_callback``), as it does since torch 2.7. So what
    was given to the last reduce-scatter of a stage stays until it reduces again, a step later.
    """

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        state = fully_shard.state(self.submod)  # type: ignore[attr-defined]
        with mock.patch.object(state, "_root_post_backward_final_callback"):
            super().perform_reduce_grad(grad_scale_factor)


def pipelined(row: Row, mesh: Any) -> tuple[list[Any], Callable[[Tensor, Tensor], None]]:
    """Return the parts of the model that are this process's, and what runs a step."""
    device, own = torch.device("cuda", torch.cuda.current_device()), mesh["pp"].get_local_rank()
    count = row.stages * (2 if row.interleaved else 1)
    layers = stage_layers(row.size, count)
    microbatch = row.batch // row.stages
    parts, stages = [], []
    for index in range(own, count, row.stages):
        with torch.device("meta"):
            part = Llama(row, layers[index])
        parallelize(part, row, mesh)
        part.to_empty(device=device)
        parts.append(part)
        own_tokens = row.tokens // row.context
        local = own_tokens // row.tensor
        halves: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
        sent = torch.empty(microbatch, local, row.size.width, **halves)
        tokens = torch.empty(microbatch, own_tokens, dtype=torch.long, device="meta")
        logits = torch.empty(microbatch, own_tokens, VOCABULARY, **halves)
        given = {"input_args": (sent if index else tokens,), "group": mesh["pp"].get_group()}
        given["output_args"] = (sent if index < count - 1 else logits,)
        stages.append(Stage(part, index, count, device, **given))
    kind: Any = ScheduleInterleaved1F1B if row.interleaved else Schedule1F1B
    own_stages = stages if row.interleaved else stages[0]
    schedule = kind(own_stages, n_microbatches=row.stages, loss_fn=loss_of)

    unknown = list(parts)

    def step(tokens: Tensor, labels: Tensor) -> None:
        learn_shapes(row, unknown, own)
        unknown.clear()
        arguments = (tokens,) if own == 0 else ()
        targets = {"target": labels, "losses": []} if own == row.stages - 1 else {}
        schedule.step(*arguments, **targets)

    return parts, step


def learn_shapes(row: Row, parts: Iterable[Llama], own: int) -> None:
    """Run each stage once without gradients, as a process of then did in its first step.

    So it learned what the stage gives: torch/distributed/pipelining/stage.py of torch 2.6,
    ``PipelineStage._shape_inference``. What that leaves to the caching allocator stays.
    """
    count, tokens = row.batch // row.stages, row.tokens // row.context
    for index, part in enumerate(parts):
        if own == 0 and index == 0:
            given = torch.zeros(count, tokens, dtype=torch.long, device="cuda")
        else:
            sizes = (count, tokens // row.tensor, row.size.width)
            given = torch.zeros(sizes, dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            part(given)


def whole(row: Row, mesh: Any) -> tuple[list[Any], Callable[[Tensor, Tensor], None]]:
    """Return the model, and what runs a step."""
    with torch.device("meta"):
        model: Any = Llama(row, range(row.size.layers))
    parallelize(model, row, mesh)
    model.to_empty(device="cuda")

    def step(tokens: Tensor, labels: Tensor) -> None:
        logits = model(tokens)
        loss = loss_of(logits, labels)
        del logits
        loss.backward()

    return [model], step


def sequences_shared(row: Row, mesh: Any, parts: list[Any], *given: Tensor) -> Any:
    """Return what shares sequences (torchtitan's ``create_context_parallel_ctx``).

    Stages of pipelines kept the angles of all tokens then.
    """
    attention: Any = import_module("torch.distributed.tensor.experimental._attention")
    attention.set_rotate_method("allgather")
    buffers = [*given, *([parts[0].angles] if row.stages == 1 else [])]
    dims = [1, 1, 0][: len(buffers)]
    kept = {"buffer_seq_dims": dims, "no_restore_buffers": set(given)}
    return attention.context_parallel(mesh, buffers=buffers, **kept)


def train(row: Row) -> None:
    """Run training steps."""
    dist.init_process_group("nccl")
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention was the first choice then
    shape = (row.stages, row.sharded, row.context, row.tensor)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    parts, step = pipelined(row, mesh) if row.stages > 1 else whole(row, mesh)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizers = [torch.optim.AdamW(part.parameters(), lr=3e-4, foreach=True) for part in parts]
    for _ in range(STEPS):
        batch = torch.randint(VOCABULARY, (row.batch, row.tokens + 1))
        tokens, labels = batch[:, :-1].cuda(), batch[:, 1:].cuda()
        for optimizer in optimizers:
            optimizer.zero_grad()
        with ExitStack() as stack:
            if row.tensor > 1:
                stack.enter_context(loss_parallel())
            if row.context > 1:
                stack.enter_context(sequences_shared(row, mesh["cp"], parts, tokens, labels))
            step(tokens, labels)
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
        if row.float8 and row.sharded > 1:
            for part in parts:
                import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(part)


def _put_together(gathered: Tensor, parts: int, dimension: int) -> Tensor:
    return torch.cat(torch.chunk(gathered, parts), dimension)


@contextmanager
def inductor_of(row: Row, *, today: bool = False) -> Iterator[None]:
    """Have Inductor give each buffer that is free to the next of its size, as that of then did.

    Today it does so only where the peak that it estimates stays as it is (torch/_inductor/codegen/
    wrapper.py, ``AllocateLine.should_reuse_buffer``). That of torch 2.6 has no such condition.
    """
    allocation = import_module("torch._inductor.codegen.wrapper").AllocateLine
    inductor = import_module("torch._inductor.config")
    with ExitStack() as stack:
        if hasattr(allocation, _REUSE) and not today:
            stack.enter_context(mock.patch.object(allocation, _REUSE, return_value=True))
        stack.enter_context(inductor.patch(_micro_pipeline_tp=row.asynchronous))
        collectives = import_module("torch.distributed._functional_collectives")
        if hasattr(collectives, _PUT_TOGETHER):
            stack.enter_context(mock.patch.object(collectives, _PUT_TOGETHER, _put_together))
        yield


def main() -> None:
    """Trace, and print the figures beside the published ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    help = "reuse buffers of compiled code as the installed torch does"
    parser.add_argument("--today", action="store_true", help=help)
    help = "trace these processes, rather than those that may take most"
    parser.add_argument("--ranks", nargs="+", type=int, metavar="RANK", help=help)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in options.names or ROWS:
        row = ROWS[name]
        for rank in options.ranks or row.ranks:
            begin = time.process_time()
            with inductor_of(row, today=options.today):
                profile = trace(
                    partial(train, row),
                    device="cuda",
                    gpu="h100",
                    memory="96 GB",
                    allocator="expandable_segments:True" if row.expandable else "",
                    world_size=row.gpus,
                    rank=rank,
                    values="none",
                )
            reserved, allocated = (profile.reserved_peak or 0) / 2**30, profile.peak / 2**30
            against = f"{reserved / row.published - 1:+.1%}"
            seconds = time.process_time() - begin
            gaps = reserved - allocated, row.published - allocated
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            found = [allocated, reserved, row.published, against, *gaps, seconds, resident]
            rows.append([name, rank, *found])
    headers = ["", "rank", "allocated GiB", "reserved GiB", "published GiB", "difference"]
    headers += ["gaps GiB", "gaps if published GiB", "seconds", "resident GiB"]
    print(tabulate(rows, headers, floatfmt=".1f"))
    print(f"\ntorch {torch.__version__}")


if __name__ == "__main__":
    main()
