"""Jagged nested tensors: a subclass in Python on ordinary values and offsets."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import pytest_torchmem as torchmem
from tests.results import in_a_trace

pytestmark = pytest.mark.filterwarnings("ignore")


class Layers(nn.Module):
    """Linear layers and a norm on sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, *sequences: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(sequences), layout=torch.jagged)
        hidden: Tensor = self.norm(self.first(nested)).relu()
        return hidden.values().sum()


class Attention(nn.Module):
    """Attention between sequences of different lengths."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(16, 32, dtype=dtype) for _ in range(3)])
        self.out = nn.Linear(32, 8, dtype=dtype)

    def forward(self, *sequences: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(sequences), layout=torch.jagged)
        heads = [
            projection(nested).unflatten(-1, (4, 8)).transpose(1, 2)
            for projection in self.projections
        ]
        attended = functional.scaled_dot_product_attention(*heads)
        output: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return torch.nested.to_padded_tensor(output, 0.0)


class OfOffsets(nn.Module):
    """Values and offsets that the caller has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(values, offsets)
        return self.linear(nested).softmax(-1).to_padded_tensor(0.0)


class OfNested(nn.Module):
    """A nested tensor that the caller has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, nested: Tensor) -> Tensor:
        hidden: Tensor = self.linear(nested).relu()
        return hidden.values().sum()


@pytest.fixture(scope="module", autouse=True)
def warmed() -> None:
    """The first call of a process leaves references behind that only the collector finds."""
    Layers()(torch.randn(5, 16), torch.randn(3, 16)).backward()
    gc.collect()


def jagged(requires_grad: bool = False) -> Tensor:
    return torch.nested.nested_tensor(
        [torch.randn(5, 16), torch.randn(3, 16)], layout=torch.jagged, requires_grad=requires_grad
    )


CASES: dict[str, tuple[nn.Module, Callable[[], tuple[Any, ...]]]] = {
    "layers": (Layers(), lambda: (torch.randn(5, 16), torch.randn(3, 16))),
    "attention": (Attention(), lambda: (torch.randn(5, 16), torch.randn(3, 16))),
    "long attention": (Attention(), lambda: (torch.randn(200, 16), torch.randn(300, 16))),
    "offsets": (OfOffsets(), lambda: (torch.randn(8, 16), torch.tensor([0, 5, 8]))),
    "an input": (OfNested(), lambda: (jagged(),)),
    "an input with a gradient": (OfNested(), lambda: (jagged(True),)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_as_the_real_allocator(case: str) -> None:
    model, arguments = CASES[case]
    inputs = arguments()
    measured = torchmem.measure(model, *inputs)
    assert torchmem.trace(model, *inputs, host="here").figures() == measured.figures()


@pytest.mark.parametrize("case", list(CASES))
def test_on_cuda(case: str) -> None:
    model, arguments = CASES[case]
    profile = torchmem.trace(model, *arguments(), device="cuda")
    assert profile.backward_peak is not None
    assert not profile.unknown_workspaces


@pytest.mark.parametrize(
    ("dtype", "operator"),
    [
        (torch.float16, "aten::_flash_attention_forward"),
        (torch.float32, "aten::_efficient_attention_forward"),
        (torch.float64, "aten::_softmax_backward_data.out"),
    ],
)
def test_attention_on_cuda_is_the_gpus(dtype: torch.dtype, operator: str) -> None:
    model = Attention(dtype)
    inputs = (torch.randn(5, 16, dtype=dtype), torch.randn(3, 16, dtype=dtype))
    profile = torchmem.trace(model, *inputs, device="cuda")
    assert operator in {one.origin.operator for one in profile.timeline.allocations}


@in_a_trace("cuda")
def test_a_wrapper_says_where_its_values_are() -> None:
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, device="cuda"
    )
    assert nested.device == nested.values().device == torch.device("cuda", 0)
    assert nested.is_cuda
