"""Rank 0 of a training step of Llama 3.1 405B on 512 GPUs: ``fully_shard`` and tensor parallel 8.

    python -m benchmarks.llama_405b_rank [--layers 126]

Prints the peaks, what is alive at the peak by kind, the processor time and the resident memory.
The step is that of torchtitan's ``llama3`` with ``data_parallel_shard_degree = 64`` and
``tensor_parallel_degree = 8``: sequence parallel, parameters in bfloat16 and gradients reduced in
float32, every layer checkpointed, AdamW, 8,192 tokens for each process.
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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

from benchmarks.torchtitan_llama import LARGE, TOKENS, VOCABULARY, FeedForward, loss_of
from pytest_torchmem import trace

WIDTH, KEYS, HEAD = LARGE.width, LARGE.keys, LARGE.head
WORLD, TENSOR, BATCH = 512, 8, 1


class Attention(nn.Module):
    """Attention with fewer heads for keys than for queries."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, KEYS * HEAD, bias=False)
        self.wv = nn.Linear(WIDTH, KEYS * HEAD, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*x.shape[:2], -1, HEAD).transpose(1, 2)
            for part in (self.wq(x), self.wk(x), self.wv(x))
        )
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(found.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward(LARGE)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Llama 3.1 405B."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model: Any, mesh: Any) -> None:
    """Split the model as torchtitan's ``apply_tp``, ``apply_ac`` and ``apply_fsdp`` do."""
    tensor = mesh["tp"]
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, tensor, plan)
    gathered: dict[str, Any] = {
        "input_layouts": (Shard(1),),
        "desired_input_layouts": (Replicate(),),
    }
    for index, layer in enumerate(model.layers):
        parallelize_module(
            layer,
            tensor,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**gathered),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(**gathered),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        model.layers[index] = checkpoint_wrapper(layer)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = {"mesh": mesh["dp"], "mp_policy": policy}
    fully_shard(model.tok_embeddings, **shard)
    for layer in model.layers:
        fully_shard(layer, **shard)
    fully_shard([model.norm, model.output], **shard, reshard_after_forward=False)
    fully_shard(model, **shard)


def step(layers: int) -> None:
    """Run one training step."""
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (WORLD // TENSOR, TENSOR), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Llama(layers)
    parallelize(model, mesh)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), device="cuda")
    with loss_parallel():
        logits = model(tokens)
        loss_of(logits, tokens).backward()
    del logits
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    """Trace, and print what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=LARGE.layers)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    begin, processor = time.perf_counter(), time.process_time()
    profile = trace(
        step, options.layers, device="cuda", gpu="h100", memory="unlimited", world_size=WORLD
    )
    seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(profile.table(5))
    for kind, nbytes in profile.by_kind().items():
        print(f"{kind:24} {nbytes / 2**30:8.2f} GiB")
    begin = time.perf_counter()
    print(f"reserved {profile.reserved_peak / 2**30:.2f} GiB", end=", ")  # type: ignore[operator]
    print(f"replayed in {time.perf_counter() - begin:.1f} s")
    print(
        f"traced in {seconds:.1f} s ({processor:.1f} s of a processor), {resident:.2f} GiB resident"
    )
    for warning in profile.warnings:
        print(warning)


if __name__ == "__main__":
    main()
