"""What the steps of a random program do: each takes and returns matrices of one size."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Unary = Callable[[Tensor], Tensor]
Binary = Callable[[Tensor, Tensor], Tensor]


def _normalised(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _attention(x: Tensor) -> Tensor:
    heads = x.view(1, x.shape[0], 2, -1).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return mixed.transpose(1, 2).reshape(x.shape)


def _cross_entropy(x: Tensor) -> Tensor:
    targets = torch.arange(x.shape[0]) % x.shape[1]
    return x * functional.cross_entropy(x, targets)


UNARY: dict[str, Unary] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "leaky_relu": functional.leaky_relu,
    "exp": lambda x: torch.exp(-x * x),
    "sqrt": lambda x: torch.sqrt(x.abs() + 1.0),
    "square": torch.square,
    "negate": torch.neg,
    "scale": lambda x: x * 0.5,
    "shift": lambda x: x + 1.0,
    "clamp": lambda x: x.clamp(-1.0, 1.0),
    "softmax": lambda x: functional.softmax(x, -1),
    "log_softmax": lambda x: functional.log_softmax(x, 0),
    "layer_norm": _normalised,
    "dropout": lambda x: functional.dropout(x, 0.3),
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "centred": lambda x: x - x.mean(0, keepdim=True),
    "normed": lambda x: x / (1.0 + x.norm(dim=-1, keepdim=True)),
    "cumulated": lambda x: x.cumsum(1) / x.shape[1],
    "largest": lambda x: x * x.amax(1, keepdim=True),
    "sorted": lambda x: x.sort(1).values,
    "rolled": lambda x: x.roll(1, 0),
    "flipped": lambda x: x.flip(0),
    "triangular": torch.tril,
    "halves": lambda x: torch.cat(x.chunk(2, 0)[::-1], 0),
    "rows": lambda x: torch.stack(x.unbind(0), 0),
    "picked": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "gathered": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.int64)),
    "repeated": lambda x: x[:1].repeat(x.shape[0], 1),
    "padded": lambda x: functional.pad(x, (1, 0))[:, :-1],
    "double": lambda x: x.double().to(x.dtype),
    "cloned": torch.clone,
    "contiguous": lambda x: x.t().contiguous(),
}

BINARY: dict[str, Binary] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": lambda x, y: x / (1.0 + y.abs()),
    "maximum": torch.maximum,
    "matmul": lambda x, y: x @ y / x.shape[0],
    "matmul_transposed": lambda x, y: x @ y.t() / x.shape[0],
    "batched": lambda x, y: torch.bmm(x.unsqueeze(0), y.unsqueeze(0)).squeeze(0) / x.shape[0],
    "linear": functional.linear,
    "linear_bias": lambda x, y: functional.linear(x, y, y[0]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y) / x.shape[0],
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(torch.ones(x.shape, dtype=torch.bool).tril(), x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "outer": lambda x, y: torch.outer(x[0], y[0]),
    "broadcast": lambda x, y: x + y[0],
    "column": lambda x, y: x * y[:, :1],
    "joined": lambda x, y: torch.cat([x, y], 1)[:, : x.shape[1]],
    "embedding": lambda x, y: x + functional.embedding(torch.arange(x.shape[0]), y),
    "mse": lambda x, y: x * functional.mse_loss(x, y),
}

VIEWS: dict[str, Unary] = {
    "transposed": torch.t,
    "flattened": lambda x: x.reshape(-1).view(x.shape),
    "unsqueezed": lambda x: x.unsqueeze(0).squeeze(0),
    "expanded": lambda x: x[:1].expand(x.shape),
    "sliced": lambda x: x[:, :1].expand(x.shape),
    "permuted": lambda x: x.view(1, *x.shape).permute(2, 1, 0).squeeze(-1),
    "detached": lambda x: x.detach(),
    "whole": lambda x: x[:],
    "strided": lambda x: x.as_strided(x.shape, x.stride()),
}

UPDATES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda x, y: x.add_(y),
    "scale_": lambda x, y: x.mul_(0.5),
    "multiply_": lambda x, y: x.mul_(y),
    "relu_": lambda x, y: x.relu_(),
    "tanh_": lambda x, y: x.tanh_(),
    "clamp_": lambda x, y: x.clamp_(-1.0, 1.0),
    "zero_": lambda x, y: x.zero_(),
    "row_": lambda x, y: x[0].copy_(y[0]),
    "column_": lambda x, y: x[:, 0].add_(y[:, 0]),
    "assigned": lambda x, y: x.__setitem__(0, y[1]),
    "masked_fill_": lambda x, y: x.masked_fill_(torch.ones(x.shape, dtype=torch.bool).triu(1), 0.0),
    "transposed_": lambda x, y: x.t().mul_(2.0),
    "index_": lambda x, y: x.index_add_(0, torch.arange(x.shape[0]), y),
}


class Doubled(torch.autograd.Function):
    """A user's own function, with a tensor saved for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2.0 * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of the square, doubled."""
        (x,) = ctx.saved_tensors
        result: Tensor = gradient * x * 4.0
        return result
