"""Composite operators on fake cuda run what the named GPU would."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchmem import trace
from pytest_torchmem.torch_private.names import TORCH_VERSION
from tests.results import cuda, in_a_trace

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
FLASH = "aten::_scaled_dot_product_flash_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
MATH = "aten::_softmax"


def operators(body: Callable[[], Any], gpu: str = "a100", device: str = "cuda") -> list[str]:
    """Return the operators that allocated while ``body`` was traced, in order."""
    profile = trace(body, device=device, gpu=gpu)
    names = [one.origin.operator for one in profile.timeline.allocations]
    return [name.replace("_safe_softmax", "_softmax") for name in names]


def of_layer(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = FLOAT) -> list[str]:
    """Return the operators of a layer and its backward."""
    return operators(lambda: layer.to("cuda", dtype)(cuda(*shape, dtype=dtype)).sum().backward())


def attention(gpu, dtype=HALF, size=64, mask=None, key_heads=4, keys=16, **options) -> str:
    """Return the implementation that an attention of 4 heads and 16 queries takes both ways."""

    def body() -> None:
        query = cuda(2, 4, 16, size, dtype=dtype)
        key, value = (cuda(2, key_heads, keys, size, dtype=dtype) for _ in range(2))
        bias = None if mask is None else torch.ones(16, keys, device="cuda", dtype=mask)
        F.scaled_dot_product_attention(query, key, value, bias, **options).sum().backward()

    found = operators(body, gpu)
    chosen = [name for name in (FLASH, EFFICIENT, CUDNN, MATH) if name in found]
    assert len(chosen) == 1, found
    if chosen[0] != MATH:
        assert f"{chosen[0]}_backward" in found
    return chosen[0]


OF_GPUS = {
    **dict.fromkeys(("t4", "v100"), (EFFICIENT, MATH)),
    **dict.fromkeys(("a10", "l4", "l40s", "rtx-3090", "rtx-4090", "rtx-5090"), (FLASH, FLASH)),
    **dict.fromkeys(("a100-40gb", "a100-80gb"), (FLASH, FLASH)),
    **dict.fromkeys(("h100", "h200", "b200"), (CUDNN, CUDNN)),
}
"""What attention in half precision and in bfloat16 is."""


@pytest.mark.parametrize("gpu", OF_GPUS)
def test_attention_of_every_gpu(gpu: str) -> None:
    assert (attention(gpu, HALF), attention(gpu, BFLOAT)) == OF_GPUS[gpu]
    assert (attention(gpu, FLOAT), attention(gpu, torch.float64)) == (EFFICIENT, MATH)


@pytest.mark.parametrize(
    ("gpu", "options", "expected"),
    [
        *(("a100", {"mask": torch.bool}, EFFICIENT), ("h100", {"mask": torch.bool}, CUDNN)),
        *(("a100", {"mask": HALF}, EFFICIENT), ("h100", {"keys": 1}, FLASH)),
        *(("a100", {"size": 60}, FLASH), ("h100", {"size": 60}, FLASH)),  # padded to 64
        *(("a100", {"size": 264}, EFFICIENT), ("h100", {"size": 192}, FLASH)),
        *(("a100", {"size": 200}, FLASH), ("rtx-4090", {"size": 200}, EFFICIENT)),
        ("a100", {"is_causal": True}, FLASH),
        ("a100", {"is_causal": True, "keys": 24}, EFFICIENT),
        ("a100", {"key_heads": 2, "enable_gqa": True}, FLASH),
        ("t4", {"key_heads": 2, "enable_gqa": True, "dtype": torch.float64}, MATH),
        ("a100", {"dtype": FLOAT, "size": 62}, MATH),
        *(("h100", {"dropout_p": 0.1}, FLASH), ("h100", {"dropout_p": 0.125}, CUDNN)),
    ],
)
def test_attention_constraints(gpu: str, options: dict[str, Any], expected: str) -> None:
    assert attention(gpu, **options) == expected


def test_attention_switches_and_order() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert attention("h100") == MATH
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert attention("h100") == EFFICIENT
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], True):
        assert attention("a100") == EFFICIENT
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert attention("h100") == FLASH
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    none = pytest.raises(RuntimeError, match="No available kernel")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), none:
        attention("a100", FLOAT)


def test_cudnn_makes_statistics_for_a_backward_alone() -> None:
    query = partial(cuda, 2, 4, 16, 64, dtype=HALF, grad=False)
    found = operators(lambda: F.scaled_dot_product_attention(*[query()] * 3), "h100")
    assert found.count(CUDNN) == 3  # the output, and two numbers for dropout


def test_attention_of_three_dimensions_is_plain() -> None:
    made = partial(cuda, 2, 16, 64, dtype=HALF)
    assert MATH in operators(lambda: F.scaled_dot_product_attention(*[made()] * 3).sum().backward())


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_cudnn(training: bool) -> None:
    found = of_layer(nn.BatchNorm2d(8).train(training), (2, 8, 4, 4))
    backward = "aten::cudnn_batch_norm_backward" if training else "aten::native_batch_norm_backward"
    assert {"aten::cudnn_batch_norm", backward} <= {*found}


@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [
        (nn.BatchNorm2d(8), (2, 8, 4, 4), BFLOAT),
        (nn.BatchNorm1d(8), (2, 8), FLOAT),
        (nn.BatchNorm2d(8, affine=False), (2, 8, 4, 4), FLOAT),
    ],
)
def test_batch_norm_that_is_native(layer, shape, dtype):
    assert "aten::native_batch_norm" in of_layer(layer, shape, dtype)


def test_instance_norm_is_cudnn() -> None:
    assert "aten::cudnn_batch_norm" in of_layer(nn.InstanceNorm2d(8, affine=True), (2, 8, 4, 4))


@pytest.mark.parametrize(
    ("program", "forward", "retained"),
    [
        (lambda x: x[torch.tensor([1, 2, 3]).numpy()], 41232, 41232),
        (lambda x: x[torch.tensor([1, 2, 3])], 41224, 41208),
        (lambda x: x[torch.tensor([1, 2], dtype=torch.int32)], 40816, 40808),
    ],
    ids=["array", "on the host", "int32"],
)
def test_an_index_goes_to_the_gpu(program, forward, retained):
    """Made of an array it is there as long as it is, of a tensor until the operator is done; of
    torch's CUDA code without a GPU, 2.13.0+cu130, as an A100's.
    """
    model = nn.Module()
    model.forward = program
    x = torch.randn(100, 100, requires_grad=True)
    profile = trace(model, x, device="cuda", gpu="a100-80gb")
    assert (profile.forward_peak, profile.retained) == (forward, retained)


@in_a_trace("cuda")
def test_an_index_of_a_tensor_on_the_host_stays_there() -> None:
    on_host, on_gpu, index = torch.ones(5, 5), torch.ones(5, 5, device="cuda"), torch.tensor([1, 2])
    on_gpu[[1, 2]] = 3.0
    assert (on_host[[0, 1]].is_cpu, on_gpu[index].is_cuda, index.is_cpu) == (True,) * 3


@in_a_trace("cuda")
def test_what_a_transform_makes_first_is_where_its_tensor_is() -> None:
    sums = torch.func.grad(lambda x: F.dropout(x).sum())
    for transformed in (sums, torch.func.vmap(F.dropout, randomness="different")):
        for device, other in (("cpu", "cuda"), ("cuda", "cpu")):
            x, _ = torch.ones(3, 8, device=device), torch.ones(3, device=other) + 1
            assert (transformed(x) + x).device.type == device


@in_a_trace("cuda")
def test_a_gradient_of_cuda_is_differentiable_and_named_as_in_torch() -> None:
    x = torch.tensor([[1.0, 3.0], [3.0, 0.0]], device="cuda", requires_grad=True)
    largest = x.max()
    assert largest.grad_fn.name() == "MaxBackward1"
    (grad,) = torch.autograd.grad(largest * largest, x, create_graph=True)
    assert grad.tolist() == [[0.0, 3.0], [3.0, 0.0]]
    grad.sum().backward()
    assert x.grad.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    torch.func.vmap(torch.func.grad(torch.median))(torch.ones(3, 3, device="cuda"))
    on_host = torch.ones(2, requires_grad=True)
    on_host.max().backward()


def test_sampling_is_cudnn_where_corners_are_aligned() -> None:
    def body(align: bool) -> None:
        image, grid = cuda(1, 3, 8, 8), cuda(1, 4, 4, 2)
        F.grid_sample(image, grid, align_corners=align).sum().backward()

    assert "aten::cudnn_grid_sampler_backward" in operators(lambda: body(True))
    assert "aten::grid_sampler_2d" in operators(lambda: body(False))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": True}])
def test_recurrent_layers_are_one_cudnn_call(kind: type, options: dict[str, Any]) -> None:
    def body() -> None:
        layer = kind(8, 16, num_layers=2, bidirectional=True, **options).cuda()
        layer(cuda(5, 3, 8))[0].sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())

    found = operators(body)
    assert {"aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"} <= {*found}
    assert "aten::bmm" not in found


@in_a_trace("cuda")
def test_weights_of_recurrent_layers_share_a_buffer() -> None:
    layer = nn.LSTM(8, 16).cuda()
    layer(cuda(5, 3, 8))[0].sum().backward()
    grads = {parameter.grad.untyped_storage()._cdata for parameter in layer.parameters()}
    weights = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    assert len(grads) * 10 + len(weights) == 11


def test_projections_of_an_lstm() -> None:
    def body() -> None:
        layer = nn.LSTM(8, 16, proj_size=4).cuda()
        output, (hidden, cell) = layer(cuda(5, 3, 8))
        assert (output.shape[-1], hidden.shape[-1], cell.shape[-1]) == (4, 4, 16)
        output.sum().backward()

    assert "aten::_cudnn_rnn" in operators(body)


OTHERS = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
BY_LISTS = [name for name, one in vars(torch.optim).items() if isinstance(one, type)]


@pytest.mark.parametrize("name", [name for name in BY_LISTS if name not in OTHERS])
def test_optimizers_work_on_lists_of_tensors(name: str) -> None:
    def body() -> None:
        layer = nn.Linear(8, 8).cuda()
        layer(cuda(2, 8)).sum().backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        getattr(torch.optim, name)(layer.parameters(), lr=0.1).step()

    assert any(operator.startswith("aten::_foreach") for operator in operators(body))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers(name: str) -> None:
    if name == "Adagrad" and "cuda_unsupported" in inspect.getsource(torch.optim.Adagrad):
        pytest.skip("this torch has a fused Adagrad for the CPU alone")

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None) -> Any:
            seen.append(operator.name())
            return operator(*args, **(kwargs or {}))

    def body() -> None:
        layer = nn.Linear(8, 8).cuda()
        layer(cuda(2, 8)).sum().backward()
        options = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1, fused=True, **options)
        with Seen():
            optimizer.step()

    seen: list[str] = []
    trace(body, device="cuda")
    assert f"aten::_fused_{name.lower()}_" in seen
    assert not any("foreach" in operator for operator in seen if "add" not in operator)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"targets": torch.int64}, {"device": "cuda"}, {"dtype": torch.float64}),
        *({"blank": 1}, {"steps": 49}),
    ],
)
@pytest.mark.parametrize("lengths_in_tensors", [False, True])
def test_ctc_loss(options: dict[str, Any], lengths_in_tensors: bool) -> None:
    expected = "aten::_ctc_loss" if options else "aten::_cudnn_ctc_loss"
    given = {"targets": torch.int32, "device": "cpu", "blank": 0, "steps": 50, "dtype": FLOAT}
    given |= options

    def body() -> None:
        scores = cuda(50, 4, 20, dtype=given["dtype"]).log_softmax(2)
        targets = torch.ones(40, dtype=given["targets"], device=given["device"])
        lengths: Any = ([given["steps"]] * 4, [10] * 4)
        if lengths_in_tensors:
            lengths = [torch.tensor(one) for one in lengths]
        for reduction in ("mean", "sum", "none"):
            loss = F.ctc_loss(scores, targets, *lengths, blank=given["blank"], reduction=reduction)
            assert loss.shape == ((4,) if reduction == "none" else ())
            loss.sum().backward(retain_graph=True)

    found = operators(body)
    assert {"aten::_ctc_loss", "aten::_cudnn_ctc_loss"} & {*found} == {expected}
    assert ("aten::_ctc_loss_backward" in found) == (expected == "aten::_ctc_loss")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_group_norm_without_gradients(context: Any) -> None:
    image = torch.ones(2, 8, 4, 8).contiguous(memory_format=torch.channels_last)

    def body() -> None:
        with context():
            F.group_norm(image.cuda(), 2)

    found = operators(body)
    # Since torch 2.14 the operator makes the copy that its kernel needs.
    copied = "aten::clone" if TORCH_VERSION < (2, 14) else "aten::native_group_norm"
    assert found == ["aten::_to_copy", copied, *["aten::native_group_norm"] * 3]
    assert operators(body) == found


@pytest.mark.parametrize("heads", [1, 2])
def test_grouped_queries_in_single_precision(heads: int) -> None:
    """From torch 2.14 on memory-efficient attention takes them."""
    expected = EFFICIENT if TORCH_VERSION >= (2, 14) else MATH
    assert attention("a100", FLOAT, key_heads=heads, enable_gqa=True) == expected


def test_operators_without_a_kernel_for_cuda_are_refused_as_torch_does() -> None:
    with pytest.raises(NotImplementedError, match=r"aten::histogram.bin_ct.*'CUDA' backend"):
        trace(lambda: torch.histogram(cuda(8, grad=False), 4), device="cuda")
