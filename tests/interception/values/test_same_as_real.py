"""Programs compute in a trace what they compute for real: outputs, gradients, losses."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError
from tests.results import in_a_trace, on_fake_cuda, result_of

Program = Callable[[str, torch.dtype], list[Tensor]]
_TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 4e-2)}


def _padding(device: str, *, whole_row: bool = False) -> Tensor:
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[0, 4:] = mask[2, 0 if whole_row else 2 :] = True
    return mask.to(device)


def _encoder(width: int, norm_first: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Padding in evaluation makes nested tensors of the batch."""
    layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width)).to(device, dtype).eval()
    with torch.no_grad():
        x = torch.randn(3, 6, width).to(device, dtype)
        return [model(x, src_key_padding_mask=_padding(device)), model(x)]


def _layer(width: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    model = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True).to(device, dtype).eval()
    with torch.inference_mode():
        x = torch.randn(3, 6, width).to(device, dtype)
        return [model(x, src_key_padding_mask=_padding(device)).clone()]


def _attention(weights: bool, causal: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
    model = nn.MultiheadAttention(16, 2, batch_first=True).to(device, dtype).eval()
    x = torch.randn(3, 6, 16).to(device, dtype)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1).to(device) if causal else None
    found = []
    for padding in (_padding(device), _padding(device, whole_row=True), None):
        with torch.no_grad():
            made = model(x, x, x, key_padding_mask=padding, need_weights=weights, attn_mask=mask)
        found += [one for one in made if one is not None]
    return found


def _masked(kind: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Rows that attend to nothing, and gradients."""
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    allowed[0, :, :, :2] = False  # padding on the left
    mask = allowed.to(device)
    if kind != "boolean":
        least = -math.inf if kind == "infinite" else torch.finfo(dtype).min
        mask = torch.zeros(2, 1, 5, 5).masked_fill(~allowed, least).to(device, dtype)
    leaves = [torch.randn(2, 2, 5, 8).to(device, dtype).requires_grad_() for _ in range(3)]
    output = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    output.square().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _cell(kind: type[nn.Module], device: str, dtype: torch.dtype) -> list[Tensor]:
    made: Any = kind
    model = made(4, 8, bias=False).to(device, dtype)
    x = torch.randn(2, 4).to(device, dtype).requires_grad_()
    output = model(x)
    output = output[0] if isinstance(output, tuple) else output
    return [output.detach(), *torch.autograd.grad(output.sum(), [x, model.weight_ih])]


def _written(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Memory that was empty, of which is read what was written."""
    ones = torch.ones(4, 3, device=device, dtype=dtype)
    cache = torch.empty(1, 8, 3, device=device, dtype=dtype).to(torch.float32).clone()
    cache[:, :4] = ones * 2
    scattered, masked, filled = (ones.new_empty(4, 3) for _ in range(3))
    scattered.scatter_(0, torch.arange(4, device=device)[:, None].expand(4, 3), ones)
    masked.masked_fill_(ones > 0, 5.0)
    filled[torch.arange(4, device=device)] = ones * 3
    joined = torch.cat([ones, ones], out=torch.empty_like(ones).resize_(0))
    parameter = nn.Parameter(torch.empty(3, 3, device=device, dtype=dtype))
    nn.init.eye_(parameter)
    foreign = torch.empty(4, dtype=torch.int64)
    foreign.numpy()[:] = 7
    numbers = torch.tensor([[1, 2], [3, 4]], device=device)
    drawn = torch.empty_like(torch.empty(4, 3, device=device, dtype=dtype)).normal_()
    slopes = F.rrelu(drawn, training=True)  # which are written to memory that was empty
    written = [cache[:, :4], scattered, masked, filled, joined, parameter.detach(), foreign]
    return [*written, numbers, drawn, slopes, F.rrelu_(drawn, training=True)]


PROGRAMS: dict[str, Program] = {
    "empty memory that is written to": _written,
    "encoder with padding": partial(_encoder, 16, False),
    "encoder with padding, norms first": partial(_encoder, 16, True),
    "encoder with padding, without fused attention": partial(_encoder, 12, False),
    "encoder layer in inference": partial(_layer, 16),
    "attention with padding": partial(_attention, False, False),
    "attention with padding and weights": partial(_attention, True, False),
    "causal attention with padding": partial(_attention, False, True),
    "masked rows, boolean": partial(_masked, "boolean"),
    "masked rows, infinite": partial(_masked, "infinite"),
    "masked rows, least number": partial(_masked, "least"),
    "LSTM cell without biases": partial(_cell, nn.LSTMCell),
    "GRU cell without biases": partial(_cell, nn.GRUCell),
}


@pytest.mark.parametrize("dtype", _TOLERANCES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_outputs_and_gradients(program: str, device: str, dtype: torch.dtype) -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        return [one.float().cpu() for one in PROGRAMS[program](device, dtype)]

    def step() -> list[list[Any]]:
        return [one.tolist() for one in run(device)]

    real, relative, absolute = run("cpu"), *_TOLERANCES[dtype]
    found = [torch.tensor(one) for one in result_of(step, device=device, values="real")]
    torch.testing.assert_close(found, real, rtol=relative, atol=absolute, equal_nan=True)


_EMPTY: dict[str, Callable[[str], Tensor]] = {
    "empty": lambda device: torch.empty(3, 4, device=device),
    "empty_like": lambda device: torch.empty_like(torch.ones(3, 4, device=device)),
    "new_empty": lambda device: torch.ones(2, device=device).new_empty(3, 4),
    "like an empty one": lambda device: torch.empty(2, device=device).new_empty(3, 4),
    "empty_strided": lambda device: torch.empty_strided((3, 4), (4, 1), device=device),
    "empty_permuted": lambda device: torch.empty_permuted((3, 4), (1, 0), device=device),
    "integers": lambda device: torch.empty(3, 4, dtype=torch.int64, device=device),
    "a copy": lambda device: torch.empty(3, 4, device=device).double().clone(),
    "read and written to": lambda device: torch.empty(3, 4, device=device).add_(1),
    "a product": lambda device: torch.ones(2, 3, device=device) @ torch.empty(3, 4, device=device),
}


@pytest.mark.parametrize("kind", _EMPTY)
def test_memory_that_nobody_has_written_to_is_not_known(kind: str, device: str) -> None:
    told: list[str] = []

    def decides() -> None:
        total = _EMPTY[kind](device).sum()
        told.append(f"{total.item()}")
        if total > 0:
            told.append("decided")

    with pytest.raises(UnknownValueError, match="memory that nobody has written to"):
        trace(decides, device=device, values="real")
    assert told == ["?" if kind == "integers" else "nan"]


@in_a_trace(values="real")
def test_a_tensor_with_nan_equals_itself_on_cuda_alone(device: str) -> None:
    """Native/ReduceOps.cpp, ``cpu_equal``, and cuda/Equal.cpp."""
    numbers = torch.tensor([1.0, math.nan], device=device)
    assert torch.equal(numbers, numbers) is (device == "cuda")
    assert torch.equal(numbers[:1], numbers[:1])


@pytest.mark.parametrize("dtype", _TOLERANCES, ids=str)
def test_attention_on_cuda_that_drops_everything(dtype: torch.dtype) -> None:
    """Flash attention refuses it; the memory-efficient kernel multiplies 0 and 1 / 0."""

    def step() -> list[bool]:
        leaves = [torch.ones(1, 2, 4, 8, device="cuda", dtype=dtype, requires_grad=True)] * 2
        values = torch.ones(1, 2, 4, 8, device="cuda", dtype=dtype, requires_grad=True)
        output = F.scaled_dot_product_attention(*leaves, values, dropout_p=1.0)
        found = [output, *torch.autograd.grad(output.sum(), [leaves[0], values])]
        return [bool(one.isnan().any()) for one in found]

    if dtype is torch.bfloat16:
        with pytest.raises(RuntimeError, match=r"Expected p_dropout < 1.f to be true"):
            trace(step, device="cuda")
    else:
        assert on_fake_cuda(step, values="real") == [True, True, False]


def test_real_tensors_that_the_step_reaches_read_as_they_were_written(device: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
    before = [one.clone() for one in (x, *model.state_dict().values())]

    def step() -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(3):
            loss = model.train()(x).square().sum() + model.eval()(x).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            x.add_(1)
            losses.append(loss.item())
        running: Any = model[1].running_mean  # which the kernel writes to without saying so
        return [losses, x.tolist(), model[0].weight.tolist(), running.numpy().tolist()]

    made = result_of(step, device=device, values="real")
    assert all(map(torch.equal, (x, *model.state_dict().values()), before))
    for found, real in zip(made, step(), strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(real), rtol=1e-4, atol=1e-5)


def test_statistics_of_a_batch_that_is_not_known_are_not_known() -> None:
    norm = nn.BatchNorm1d(3)

    def step(x: torch.Tensor) -> list[str]:
        norm.eval()(x)
        known = f"{norm.running_mean.sum().item()}"  # type: ignore[union-attr, operator]
        norm.train()(x)
        return [known, f"{norm.running_mean.sum().item()}"]  # type: ignore[union-attr, operator]

    assert result_of(lambda: step(torch.empty(4, 3)), values="real") == ["0.0", "nan"]


def _bilinear(lowers: bool) -> Tensor:
    """``_trilinear`` calls ``bmm``; native/Linear.cpp."""
    torch.manual_seed(0)
    layer, left, right = nn.Bilinear(20, 10, 6), torch.randn(8, 20), torch.randn(8, 10)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=lowers):
        return layer(left, right)


def _fast_path(lowers: bool) -> Tensor:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=lowers):
        return layer(x).float()


@pytest.mark.parametrize("program", [_bilinear, _fast_path])
def test_autocast_lowers_what_a_body_calls_whatever_it_ran_in_before(program):
    for lowers in (False, True, True, False):
        found: list[Tensor] = []
        step = partial(program, lowers)
        note = partial(lambda found, step: found.append(torch.tensor(step().tolist())), found, step)
        profile = trace(note, device="cpu", values="real", host="here")
        torch.testing.assert_close(found[0], step())
        assert profile.peak == measure(step, device="cpu").peak


@pytest.mark.parametrize("values", ["auto", "none", "real"])
def test_a_process_alone_gets_its_own(device: str, values: str) -> None:
    def program() -> None:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        x = torch.arange(4, device=device)
        gathered, reduced, exchanged, *listed = (torch.empty_like(x) for _ in range(4))
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(reduced, x)
        dist.all_to_all_single(exchanged, x)
        dist.all_gather(listed, x)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        for one in (gathered, reduced, exchanged, listed[0], x):
            assert one.sum() == 6
        if values != "none":
            assert functional.all_reduce(x, "sum", dist.group.WORLD).sum() == 6
        dist.barrier()

    trace(program, device=device, values=values)


@in_a_trace()
def test_objects(device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    gathered, at_root, scattered = ([None] for _ in range(3))
    sent = ["a", {"b": 2}]
    dist.all_gather_object(gathered, {"loss": 1.5})
    dist.broadcast_object_list(sent, 0)
    dist.gather_object({"x": 1}, at_root)
    dist.scatter_object_list(scattered, [{"y": 2}])
    assert gathered + at_root + scattered == [{"loss": 1.5}, {"x": 1}, {"y": 2}]
    assert sent == ["a", {"b": 2}]


def test_a_functional_collective_requests_its_output_once() -> None:
    def program() -> None:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        x = torch.ones(1 << 16)
        assert functional.all_reduce(x, "sum", dist.group.WORLD).shape == x.shape

    assert trace(program).peak == 2 * 4 * (1 << 16)


@in_a_trace("cpu")
def test_a_tensor_that_is_resized_keeps_its_values() -> None:
    for size in (8, 1 << 20):
        bytes_ = torch.arange(8, dtype=torch.uint8).resize_(size)
        assert bytes_[5] == 5
