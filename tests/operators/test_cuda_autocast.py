"""Autocast on fake cuda casts what ``torch.autocast("cuda")`` casts, and keeps what it keeps."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.fake_cuda import decompositions as lists
from tests.results import in_a_trace, on_fake_cuda, result_of

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("error")


def cuda(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda")


def test_every_operator_that_torch_casts_is_in_a_list() -> None:
    known = {*lists.LOWER_PRECISION, *lists.WIDEST, *lists.BANNED, *lists.RECURRENT}
    known |= {*lists.FLOAT32, *lists.FLOAT32_BY_DTYPE_ARGUMENT, *lists.FLOAT32_BY_OVERLOAD}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [one for one in torch._C._dispatch_get_all_op_names() if one.startswith("aten::")]
    registered = {one.removeprefix("aten::") for one in names if has(one, "AutocastCUDA")}
    # Before torch 2.13 there are tensors with named dimensions, which a trace does not cast.
    assert registered - known - {name for name in registered if "name" in name.lower()} == set()


@in_a_trace("cuda")
def test_the_dtype_of_the_region() -> None:
    x = cuda(4, 4)
    found: list[Any] = [torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")]
    with torch.amp.autocast("cuda", dtype=BFLOAT):
        found += [torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")]
        found.append((x @ x).dtype)
        with torch.autocast("cuda", enabled=False):
            found += [torch.is_autocast_enabled("cuda"), (x @ x).dtype]
            with torch.autocast("cuda", dtype=HALF):
                found.append((x @ x).dtype)
        found.append((x @ x).dtype)
    outside, within, switched_off = [False, HALF], [True, BFLOAT, BFLOAT], [False, FLOAT]
    expected = [*outside, *within, *switched_off, HALF, BFLOAT, FLOAT]
    assert [*found, (x @ x).dtype] == expected


def test_binary_cross_entropy_is_banned() -> None:
    def body() -> None:
        with torch.autocast("cuda"):
            functional.binary_cross_entropy(cuda(4), cuda(4))

    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        trace(body, device="cuda")


def live() -> int:
    """Return the bytes that are allocated now."""
    return torch.cuda.memory_allocated()


@in_a_trace("cuda")
def test_casts_of_weights_are_kept_until_the_outermost_region_ends() -> None:
    weight = nn.Parameter(cuda(256, 256))
    x = cuda(256, 256, dtype=HALF)
    x @ x  # takes cuBLAS's workspace, which stays
    start = live()
    found = []
    with torch.autocast("cuda"), torch.no_grad():
        with torch.autocast("cuda"):
            weight @ x
        found.append(live() - start)
        weight @ x
        found.append(live() - start)
    found.append(live() - start)
    with torch.autocast("cuda", cache_enabled=False), torch.no_grad():
        weight @ x
        found.append(live() - start)
    with torch.autocast("cuda"), torch.no_grad():
        weight.detach() @ x  # not a leaf that requires grad
        found.append(live() - start)
    assert found == [2 * 256 * 256, 2 * 256 * 256, 0, 0, 0]


@in_a_trace("cuda")
def test_casts_are_not_kept_in_inference_mode() -> None:
    # autocast_mode.cpp, cached_cast (pytorch/pytorch#165068), as on the CPU
    layer = nn.Linear(256, 256, bias=False).cuda()
    x = cuda(256, 256, dtype=HALF)
    layer.weight.half() @ x  # takes cuBLAS's workspace, which stays
    start = live()
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), torch.autocast("cuda"):
            layer(x)
            found.append(live() - start)
    assert found == [0, 2 * 256 * 256]


@in_a_trace("cuda")
def test_a_cast_made_without_gradients_serves_with_them() -> None:
    layer = nn.Linear(8, 8, bias=False).cuda()
    x = cuda(2, 8)
    with torch.autocast("cuda"):
        with torch.no_grad():
            layer(x)
        loss = layer(x).float().sum()
    loss.backward()
    assert layer.weight.grad is not None


def test_a_cached_cast_has_one_gradient_path() -> None:
    def body() -> None:
        layer = nn.Linear(8, 8, bias=False).cuda()
        x = cuda(2, 8)
        with torch.autocast("cuda"):
            loss = (layer(x) + layer(x)).float().sum()
        loss.backward()
        assert layer.weight.grad.dtype is FLOAT

    made = trace(body, device="cuda").timeline.allocations
    found = [(one.origin.operator, one.shape, one.dtype) for one in made]
    assert found.count(("aten::_to_copy", (8, 8), "float16")) == 1


@in_a_trace("cuda")
def test_custom_functions() -> None:
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=HALF)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            seen.append((x.dtype, torch.is_autocast_enabled("cuda")))
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            seen.append((gradients[0].dtype, torch.is_autocast_enabled("cuda")))
            return gradients[0] @ x

    x = cuda(4, 4).requires_grad_()
    with torch.autocast("cuda"):
        output = Product.apply(x)
    output.sum().backward()
    assert seen == [(HALF, False), (HALF, False)]


@pytest.mark.parametrize(
    ("reduce", "after"),
    [
        (lambda output: output.float().mean(), [2, 65536.0]),
        # The scale is infinite in half precision, in which the mean is computed: it is halved.
        (Tensor.mean, [2, 32768.0]),
        # The same of the gradient of a sum; half of it is infinite where the bias gets it twice.
        (Tensor.sum, [0, 16384.0]),
    ],
)
@in_a_trace("cuda")
def test_a_gradient_scaler_lets_the_optimizer_step(reduce, after):
    layer = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(layer.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda"):
            loss = reduce(layer(cuda(2, 8)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [len(optimizer.state), scaler.get_scale()] == after


@in_a_trace("cuda")
def test_recurrent_layers_run_in_half_precision() -> None:
    layer = nn.LSTM(8, 16).cuda()
    with torch.autocast("cuda", dtype=BFLOAT):
        output, _ = layer(cuda(5, 3, 8))
    output.float().sum().backward()
    assert [output.dtype, layer.weight_ih_l0.grad.dtype] == [HALF, FLOAT]


@in_a_trace("cuda")
def test_checkpoints_compute_again_in_the_same_region() -> None:
    dtypes, x = [], cuda(4, 4).requires_grad_()

    def part(value: torch.Tensor) -> torch.Tensor:
        product = value @ value
        dtypes.append(product.dtype)
        return product.exp()

    with torch.autocast("cuda", dtype=BFLOAT):
        output = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
    output.float().sum().backward()
    assert dtypes == [BFLOAT, BFLOAT]


def test_a_trace_inside_of_a_region() -> None:
    dtypes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a build without cuda torch switches the region off
        region = torch.autocast("cuda")
    region._enabled = True
    with region:
        trace(lambda: dtypes.append((cuda(2, 2) @ cuda(2, 2)).dtype), device="cuda")
    assert dtypes == [HALF]


def test_autocast_on_the_host() -> None:
    def body() -> list[torch.dtype]:
        x = torch.ones(4, 4)
        with torch.autocast("cpu"):
            return [(x @ x).dtype, (x @ x).softmax(-1).dtype]

    assert result_of(body, device="cpu") == [BFLOAT, BFLOAT]
    assert on_fake_cuda(body) == [BFLOAT, BFLOAT]


def test_that_of_the_cpu_casts_tensors_of_the_host_alone() -> None:
    """To C++, which casts them, those on fake cuda are on the host."""

    def body() -> list[torch.dtype]:
        here, there = torch.ones(4, 4), cuda(4, 4)
        found = []
        with torch.autocast("cpu", dtype=BFLOAT):
            found += [(one @ one).dtype for one in (here, there)]
            images = (one.to(BFLOAT)[None, None, None] for one in (here, there))
            found += [functional.avg_pool3d(one, 1).dtype for one in images]
            with torch.autocast("cuda", dtype=HALF):
                found += [(one @ one).dtype for one in (here, there)]
                assert torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", enabled=False):
                found += [(one @ one).dtype for one in (here, there)]
        found += [(one @ one).dtype for one in (here, there)]
        return found

    expected = [BFLOAT, FLOAT, FLOAT, BFLOAT, BFLOAT, HALF, FLOAT, FLOAT, FLOAT, FLOAT]
    assert on_fake_cuda(body) == expected
    model, x = nn.Linear(16, 16), torch.ones(2, 16)
    outside = trace(model, x, device="cuda").figures()
    with torch.autocast("cpu", dtype=BFLOAT):
        assert trace(model, x, device="cuda").figures() == outside


def test_composite_operators_of_which_that_of_the_cpu_has_kernels_are_cast_in_parts() -> None:
    """Those of the CPU, which cast them as wholes, are known from its first region on."""

    def body() -> list[torch.dtype]:
        logits, images, label = cuda(4, 4).half(), cuda(1, 1, 3, 3), torch.ones(4).long().cuda()
        with torch.autocast("cuda", dtype=HALF):
            return [
                functional.cross_entropy(logits, label).dtype,
                functional.conv2d(images, images, padding="same").dtype,
                torch.quantile(cuda(4), 0.5).dtype,
            ]

    expected = [FLOAT, HALF, FLOAT]
    assert on_fake_cuda(body) == expected
    on_fake_cuda(lambda: torch.autocast("cpu").__enter__())
    assert on_fake_cuda(body) == expected
