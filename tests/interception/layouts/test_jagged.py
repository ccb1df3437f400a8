"""Jagged nested tensors: a subclass in Python on ordinary values and offsets."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import pytest_torchmem as torchmem
from tests.modules import Parts
from tests.results import as_measured, in_a_trace

pytestmark = pytest.mark.filterwarnings("ignore")


class Layers(Parts):
    """Linear layers and a norm on sequences of different lengths."""

    def forward(self, *sequences: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(sequences), layout=torch.jagged)
        hidden: Tensor = self.norm(self.first(nested)).relu()
        return hidden.values().sum()


class Attention(Parts):
    """Attention between sequences of different lengths."""

    def forward(self, *sequences: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(sequences), layout=torch.jagged)
        made = (projection(nested) for projection in self.projections)
        heads = [one.unflatten(-1, (4, 8)).transpose(1, 2) for one in made]
        attended = functional.scaled_dot_product_attention(*heads)
        output: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return torch.nested.to_padded_tensor(output, 0.0)


class OfOffsets(nn.Linear):
    """Values and offsets that the caller has."""

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(values, offsets)
        return super().forward(nested).softmax(-1).to_padded_tensor(0.0)


class OfNested(nn.Linear):
    """A nested tensor that the caller has."""

    def forward(self, nested: Tensor) -> Tensor:
        return super().forward(nested).relu().values().sum()


def layers() -> nn.Module:
    return Layers(first=nn.Linear(16, 32), norm=nn.LayerNorm(32))


def attention(dtype: torch.dtype = torch.float32) -> nn.Module:
    projections = nn.ModuleList([nn.Linear(16, 32) for _ in range(3)])
    return Attention(projections=projections, out=nn.Linear(32, 8)).to(dtype)


@pytest.fixture(scope="module", autouse=True)
def warmed() -> None:
    """The first call of a process leaves references behind that only the collector finds."""
    layers()(torch.randn(5, 16), torch.randn(3, 16)).backward()
    gc.collect()


def jagged(**options: Any) -> Tensor:
    rows = [torch.randn(5, 16), torch.randn(3, 16)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, **options)


CASES: dict[str, tuple[nn.Module, Callable[[], tuple[Any, ...]]]] = {
    "layers": (layers(), lambda: (torch.randn(5, 16), torch.randn(3, 16))),
    "attention": (attention(), lambda: (torch.randn(5, 16), torch.randn(3, 16))),
    "long attention": (attention(), lambda: (torch.randn(200, 16), torch.randn(300, 16))),
    "offsets": (OfOffsets(16, 32), lambda: (torch.randn(8, 16), torch.tensor([0, 5, 8]))),
    "an input": (OfNested(16, 32), lambda: (jagged(),)),
    "an input with a gradient": (OfNested(16, 32), lambda: (jagged(requires_grad=True),)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_as_the_real_allocator(case: str) -> None:
    model, arguments = CASES[case]
    as_measured(model, *arguments())


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
    inputs = (torch.randn(5, 16, dtype=dtype), torch.randn(3, 16, dtype=dtype))
    profile = torchmem.trace(attention(dtype), *inputs, device="cuda")
    assert operator in {one.origin.operator for one in profile.timeline.allocations}


@in_a_trace("cuda")
def test_a_wrapper_says_where_its_values_are() -> None:
    nested = jagged(device="cuda")
    assert nested.device == nested.values().device == torch.device("cuda", 0)
    assert nested.is_cuda
