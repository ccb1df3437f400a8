"""Nested tensors: encoder layers in inference, which make them of a padding mask."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pytest_torchmem as torchmem
from pytest_torchmem.errors import UnknownValueError, UnsupportedOperatorError
from tests.results import result_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Encoder(nn.Module):
    """An encoder in inference, as the fast path wants it."""

    def __init__(
        self,
        width: int = 64,
        heads: int = 4,
        hidden: int = 128,
        layers: int = 2,
        activation: str = "relu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, hidden, batch_first=True, activation=activation, dtype=dtype
        )
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.eval()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        with torch.no_grad():
            output: Tensor = self.encoder(x, src_key_padding_mask=mask)
        return output


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.eval()

    def forward(self, x: Tensor, mask: Tensor | None = None, weights: bool = False) -> Any:
        with torch.no_grad():
            return self.attention(x, x, x, key_padding_mask=mask, need_weights=weights)


def padding(steps: int, *lengths: int) -> Tensor:
    """Return a mask that is true behind each length."""
    return torch.arange(steps) >= torch.tensor(lengths)[:, None]


def assert_as_measured(model: nn.Module, *args: Any, backward: bool = False) -> None:
    measured = torchmem.measure(model, *args, backward=backward)
    traced = torchmem.trace(model, *args, backward=backward, host="here")
    assert traced.figures() == measured.figures()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("lengths", [(7, 4, 10), (7, 4, 8), (7, 1, 10), (7, 0, 10)], ids=str)
def test_a_padding_mask_in_evaluation(dtype, activation, lengths):
    model = Encoder(activation=activation, dtype=dtype)
    assert_as_measured(model, torch.randn(3, 10, 64, dtype=dtype), padding(10, *lengths))


def test_more_masked_tokens_than_values_are_kept_of_floating_tensors() -> None:
    """The layer makes the mask floating before it asks which tokens are masked."""
    model = Encoder(256, 8, 1024, 1)
    mask = padding(300, 300, 1, 20, 299, 77, 250, 222, 111)
    assert_as_measured(model, torch.randn(8, 300, 256), mask)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (Encoder(60, 4, 100, 1), lambda: (torch.randn(4, 30, 60), padding(30, 3, 1, 20, 29))),
        (Encoder(), lambda: (torch.randn(10, 3, 64).transpose(0, 1), padding(10, 7, 4, 10))),
        (Encoder(), lambda: (torch.randn(3, 10, 64), ~padding(10, 7, 4, 9))),
        (Encoder(), lambda: (torch.randn(3, 10, 64), None)),
        (Attention(), lambda: (torch.randn(3, 10, 64),)),
        (Attention(), lambda: (torch.randn(3, 10, 64), padding(10, 7, 4, 10))),
        (Attention(), lambda: (torch.randn(3, 10, 64), None, True)),
    ],
    ids=[
        "heads of an odd size",
        "input laid out otherwise",
        "a mask with tokens behind it, which is not made nested",
        "an encoder without a mask",
        "attention",
        "attention with a mask",
        "attention with weights",
    ],
)
def test_the_fast_path_of_inference(model, arguments):
    assert_as_measured(model, *arguments())


def test_inference_mode() -> None:
    class Inference(Encoder):
        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            with torch.inference_mode():
                output: Tensor = self.encoder(x, src_key_padding_mask=mask)
            return output

    assert_as_measured(Inference(), torch.randn(3, 10, 64), padding(10, 7, 4, 10))


def test_an_unknown_mask_is_an_error_that_names_the_line() -> None:
    class Masking(Encoder):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, x[:, :, 0] > 0)

    with pytest.raises(UnknownValueError, match=r"test_nested\.py:\d+: aten::equal"):
        torchmem.trace(Masking(), torch.randn(3, 10, 64), None, backward=False, values="none")


class Ragged(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32) if norm else nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x, y])
        hidden = self.norm(self.linear(nested)).relu()
        return torch.nested.to_padded_tensor(hidden, 0.0)


def test_training_with_nested_tensors_names_a_kernel_that_reads_data() -> None:
    assert_as_measured(Ragged(), torch.randn(5, 16), torch.randn(3, 16), backward=True)
    with pytest.raises(UnsupportedOperatorError, match="native_layer_norm_backward"):
        torchmem.trace(Ragged(norm=True), torch.randn(5, 16), torch.randn(3, 16))


def test_nested_tensors_that_outlive_their_trace_do_no_harm() -> None:
    kept: list[Tensor] = []

    def program(x: Tensor) -> None:
        kept.append(torch._nested_tensor_from_mask(x, ~padding(10, 7, 4, 10)))
        raise KeyError("outlived")

    with pytest.raises(KeyError, match="outlived"):
        torchmem.trace(program, torch.randn(3, 10, 64), values="none")
    assert kept[0]._nested_tensor_size().tolist() == [[7, 64], [4, 64], [10, 64]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        repr(kept[0])


def operators(model: nn.Module, *args: Any) -> list[str]:
    """Return the operators that allocated on the GPU."""
    profile = torchmem.trace(model, *args, backward=False, device="cuda", gpu="a100")
    return [one.origin.operator for one in profile.timeline.allocations]


@pytest.mark.parametrize(
    ("dtype", "operator"),
    [
        (torch.float16, "aten::_flash_attention_forward"),
        (torch.bfloat16, "aten::_flash_attention_forward"),
        (torch.float32, "aten::_efficient_attention_forward"),
    ],
)
def test_on_cuda_attention_of_nested_tensors_is_fused(dtype: torch.dtype, operator: str) -> None:
    model, x = Encoder(dtype=dtype), torch.randn(3, 10, 64, dtype=dtype)
    assert operator in operators(model, x, padding(10, 7, 4, 10))
    with_one_token = operators(model, x, padding(10, 7, 1, 10))
    assert operator not in with_one_token
    assert "aten::_masked_softmax" in with_one_token


def test_on_cuda_layers_take_tokens_and_no_fused_attention_a_mask_of_padding() -> None:
    """21 tokens of 3 samples are 21 rows of every linear layer."""
    x, mask = torch.randn(3, 10, 64), padding(10, 7, 4, 10)
    profile = torchmem.trace(Encoder(layers=1), x, mask, backward=False, device="cuda")
    hidden = [one for one in profile.timeline.allocations if one.shape == (21, 128)]
    assert [one.nbytes for one in hidden] == [21 * 128 * 4]
    # The layer's mask has a row for each sample, which no fused kernel takes.
    found = operators(Attention(), torch.randn(3, 10, 64), padding(10, 7, 4, 10))
    assert "aten::_masked_softmax" in found


def test_on_cuda_two_nested_tensors_in_attention_are_an_error() -> None:
    def program() -> None:
        parts = [torch.randn(2, length, 8, device="cuda") for length in (3, 5)]
        nested = torch.nested.as_nested_tensor(parts)
        nn.functional.scaled_dot_product_attention(nested, nested, nested)

    with pytest.raises(RuntimeError, match="layout=torch"):
        torchmem.trace(program, device="cuda")


def sums(device: str) -> list[float]:
    """Return sums of what nested tensors and padded ones are made of, on the way to each other."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, 4, generator=generator).to(device) for size in (5, 3, 7)]
    strided = torch.nested.as_nested_tensor(parts)
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    padded = jagged.to_padded_tensor(0.5)
    layer = nn.Linear(4, 4).to(device)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    sizes = torch.tensor([[5, 4], [3, 4], [7, 4]])
    heads = torch.arange(3 * 2 * 7 * 2.0, device=device).view(3, 2, 7, 2)
    found = [
        strided.values(),
        strided.to_padded_tensor(0.5),
        layer(strided).to_padded_tensor(0.0),  # the outermost module is given a nested tensor
        torch.ops.aten._padded_dense_to_jagged_forward(padded, [jagged.offsets()], 15),
        torch._nested_from_padded(padded, sizes).values(),
        torch._nested_from_padded(heads, sizes, True).values(),
    ]
    return [round(one.sum().item(), 3) for one in found]


def test_their_values_are_known(device: str) -> None:
    assert result_of(lambda: sums(device), device=device, values="real") == pytest.approx(
        sums("cpu"), rel=1e-4
    )
