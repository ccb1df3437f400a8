"""Rank 0 of torchtitan's published steps of Llama 3.1 8B, beside what they took on H100s.

    python -m benchmarks.torchtitan_llama

The published figures are the eager rows of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md
(tables 1 and 3; ``reserved_bytes.all.peak`` in GiB, HBM2e H100s of 96 GB, nightly torch of
2024-12-23). The step is that of torchtitan's commit 9dec370 with train_configs/llama3_8b.toml and
two sequences for each GPU: ``fully_shard`` of each layer, parameters in bfloat16 and gradients
reduced in float32, selective checkpoints that keep every other product, ``foreach`` AdamW.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pytest_torchmem import trace

WIDTH, HIDDEN, HEADS, KEYS, LAYERS, VOCABULARY = 4096, 14336, 32, 8, 32, 128256
HEAD = WIDTH // HEADS
TOKENS, BATCH, STEPS = 8192, 2, 3
PUBLISHED = {8: 82.4, 128: 67.0}
"""GiB by the number of GPUs."""

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

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).type_as(x) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of channels by the position of their token."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


def repeat(x: Tensor, times: int) -> Tensor:
    """Repeat the heads of keys or values."""
    shape = (*x.shape[:3], times, x.shape[3])
    return x[:, :, :, None].expand(shape).reshape(*x.shape[:2], -1, x.shape[3])


class Layer(nn.Module):
    """One layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(), Norm()
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, KEYS * HEAD, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def attend(self, x: Tensor, angles: Tensor) -> Tensor:
        """Run the attention."""
        parts = [linear(x).view(*x.shape[:2], -1, HEAD) for linear in (self.wq, self.wk, self.wv)]
        q, k, v = rotate(parts[0], angles), rotate(parts[1], angles), parts[2]
        k, v = repeat(k, HEADS // KEYS), repeat(v, HEADS // KEYS)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(found.transpose(1, 2).contiguous().view(x.shape))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), angles)
        given = self.ffn_norm(x)
        return x + self.w2(functional.silu(self.w1(given)) * self.w3(given))


class Llama(nn.Module):
    """Llama 3.1 8B."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("angles", torch.empty(TOKENS, HEAD // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


def _contexts() -> Any:
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        product = operator is _aten.mm.default
        products[context.is_recompute] += product
        second = product and products[context.is_recompute] % 2 == 0
        saves = operator in _SAVED and not second
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def train() -> None:
    """Run training steps."""
    dist.init_process_group("nccl")
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention was the first choice then
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model: Any = Llama()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(
            layer, context_fn=_contexts, preserve_rng_state=False
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, layer in enumerate(model.layers):
        last = index == LAYERS - 1
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)
    # The torch of then kept the parameters of the root from forward to backward whatever was asked.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1)).cuda()
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


def main() -> None:
    """Trace, and print the figures beside the published ones."""
    warnings.simplefilter("ignore")
    rows = []
    for gpus, published in PUBLISHED.items():
        profile = trace(
            train, device="cuda", gpu="h100", memory="96 GB", world_size=gpus, values="none"
        )
        reserved = (profile.reserved_peak or 0) / 2**30
        allocated = profile.peak / 2**30
        rows.append([gpus, allocated, reserved, published, f"{reserved / published - 1:+.1%}"])
    headers = ["GPUs", "allocated GiB", "reserved GiB", "published GiB", "difference"]
    print(tabulate(rows, headers, floatfmt=".1f"))
    print(f"\ntorch {torch.__version__}")


if __name__ == "__main__":
    main()
