"""Nested tensors: encoder layers in inference, which make them of a padding mask."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pytest_torchmem as torchmem
from pytest_torchmem.errors import UnknownValueError, UnsupportedOperatorError
from tests.modules import Parts
from tests.results import as_measured, result_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Encoder(nn.TransformerEncoder):
    """An encoder in inference, as the fast path wants it."""

    def __init__(self, width=64, heads=4, hidden=128, layers=2, **options: Any) -> None:
        options["batch_first"] = True
        super().__init__(nn.TransformerEncoderLayer(width, heads, hidden, **options), layers)
        self.eval()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        with torch.no_grad():
            return super().forward(x, src_key_padding_mask=mask)


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(64, 4, batch_first=True)
        self.eval()

    def forward(self, x: Tensor, mask: Tensor | None = None, weights: bool = False) -> Any:
        with torch.no_grad():
            return super().forward(x, x, x, key_padding_mask=mask, need_weights=weights)


def padding(steps: int, *lengths: int) -> Tensor:
    """Return a mask that is true behind each length."""
    return torch.arange(steps) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("lengths", [(7, 4, 10), (7, 4, 8), (7, 1, 10), (7, 0, 10)], ids=str)
def test_a_padding_mask_in_evaluation(dtype, activation, lengths):
    model = Encoder(activation=activation, dtype=dtype)
    as_measured(model, torch.randn(3, 10, 64, dtype=dtype), padding(10, *lengths), backward=False)


def test_more_masked_tokens_than_values_are_kept_of_floating_tensors() -> None:
    """The layer makes the mask floating before it asks which tokens are masked."""
    model = Encoder(256, 8, 1024, 1)
    mask = padding(300, 300, 1, 20, 299, 77, 250, 222, 111)
    as_measured(model, torch.randn(8, 300, 256), mask, backward=False)


LONGEST, TOKENS = padding(10, 7, 4, 10), torch.randn(3, 10, 64)
FAST: dict[str, tuple[Any, ...]] = {
    "odd heads": (Encoder(60, 4, 100, 1), torch.randn(4, 30, 60), padding(30, 3, 1, 20, 29)),
    "input laid out otherwise": (Encoder(), torch.randn(10, 3, 64).transpose(0, 1), LONGEST),
    "a mask with tokens behind it, not made nested": (Encoder(), TOKENS, ~padding(10, 7, 4, 9)),
    "an encoder without a mask": (Encoder(), TOKENS, None),
    "attention": (Attention(), TOKENS),
    "attention with a mask": (Attention(), TOKENS, LONGEST),
    "attention with weights": (Attention(), TOKENS, None, True),
}


@pytest.mark.parametrize("case", FAST)
def test_the_fast_path_of_inference(case: str) -> None:
    as_measured(*FAST[case], backward=False)


def test_inference_mode() -> None:
    class Inference(Encoder):
        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            with torch.inference_mode():
                return nn.TransformerEncoder.forward(self, x, src_key_padding_mask=mask)

    as_measured(Inference(), TOKENS, LONGEST, backward=False)


def test_an_unknown_mask_is_an_error_that_names_the_line() -> None:
    class Masking(Encoder):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, x[:, :, 0] > 0)

    with pytest.raises(UnknownValueError, match=r"test_nested\.py:\d+: aten::equal"):
        torchmem.trace(Masking(), torch.randn(3, 10, 64), None, backward=False, values="none")


class Ragged(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x, y])
        hidden = self.norm(self.linear(nested)).relu()
        return torch.nested.to_padded_tensor(hidden, 0.0)


def test_training_with_nested_tensors_names_a_kernel_that_reads_data() -> None:
    inputs, linear = (torch.randn(5, 16), torch.randn(3, 16)), nn.Linear(16, 32)
    as_measured(Ragged(linear=linear, norm=nn.Identity()), *inputs)
    with pytest.raises(UnsupportedOperatorError, match="native_layer_norm_backward"):
        torchmem.trace(Ragged(linear=linear, norm=nn.LayerNorm(32)), *inputs)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_cuda_attention_of_nested_tensors_is_fused(dtype: torch.dtype) -> None:
    model, x = Encoder(dtype=dtype), torch.randn(3, 10, 64, dtype=dtype)
    operator = f"aten::_{'efficient' if dtype.itemsize == 4 else 'flash'}_attention_forward"
    assert operator in operators(model, x, LONGEST)
    with_one_token = operators(model, x, padding(10, 7, 1, 10))
    assert operator not in with_one_token
    assert "aten::_masked_softmax" in with_one_token


def test_on_cuda_layers_take_tokens_and_no_fused_attention_a_mask_of_padding() -> None:
    """21 tokens of 3 samples are 21 rows of every linear layer."""
    profile = torchmem.trace(Encoder(layers=1), TOKENS, LONGEST, backward=False, device="cuda")
    hidden = [one for one in profile.timeline.allocations if one.shape == (21, 128)]
    assert [one.nbytes for one in hidden] == [21 * 128 * 4]
    # The layer's mask has a row for each sample, which no fused kernel takes.
    assert "aten::_masked_softmax" in operators(Attention(), TOKENS, LONGEST)


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
    found = result_of(lambda: sums(device), device=device, values="real")
    assert found == pytest.approx(sums("cpu"), rel=1e-4)
