"""Small integers, booleans and tables keep their values; the rest is asked for in vain."""

import ctypes
import gc
import math
import pickle
import re
import statistics
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.torch_private.names import TORCH_VERSION
from tests.results import as_measured, in_a_trace, result_of, through_a_file
from tests.tracing.programs import differences


@in_a_trace()
def test_control_flow_and_shapes_follow_known_values() -> None:
    mask, lengths = torch.tensor([True, False, True, False]), torch.tensor([3, 5, 2])
    x = torch.randn(4, 8)
    assert (bool(mask.any()), int(lengths.max())) == (True, 5)
    assert (x[mask].shape, mask.nonzero().shape) == ((2, 8), (2, 1))
    assert torch.unique(torch.tensor([1, 1, 2])).tolist() == [1, 2]
    x[mask] = 0.0
    steps = torch.zeros(())
    steps += 1
    assert steps.item() == 1.0
    assert [rate.item() for rate in torch.linspace(0, 1, 3)] == [0.0, 0.5, 1.0]
    assert (torch.arange(6).view(2, 3)[:, 1:] + 1).tolist() == [[2, 3], [5, 6]]
    assert (torch.arange(5) % 3).tolist() == [0, 1, 2, 0, 1]
    assert (torch.arange(5) > lengths[:, None]).sum().item() == 3


def test_inputs_keep_their_values() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x[mask] if mask.any() else x

    x = torch.randn(4, 8, requires_grad=True)
    some = trace(Picks(), x, torch.tensor([True, False, False, False]))
    assert some.retained != trace(Picks(), x, torch.zeros(4, dtype=torch.bool)).retained


def test_an_unknown_floating_number_is_one_with_one_warning() -> None:
    def program() -> None:
        loss = torch.randn(4, 8, requires_grad=True).sum()
        loss.backward()
        assert [float(loss.item()), float(loss)] == [1.0, 1.0]

    profile = trace(program, values="none")
    assert len(profile.warnings) == 2
    assert "test_known_values.py" in profile.warnings[0]


DECIDING = (bool, int, hash, "%d".__mod__, math.ceil, np.exp, sorted, [0.5].count)


def test_a_history_of_unknown_numbers_is_no_known_one_after_the_trace(device: str) -> None:
    kept: list[float] = []

    def program() -> None:
        loss = torch.randn(4, 8, device=device).sum().item()
        kept.extend([loss, statistics.mean([loss, 3]), deepcopy(loss), through_a_file(loss)])
        kept.append(pickle.loads(pickle.dumps(loss)) * 2)

    trace(program, device=device, values="none")
    for history in (kept, deepcopy(kept), torch.tensor(kept), [math.exp(one) for one in kept]):
        assert all(map(math.isnan, history))
    for decide in DECIDING:
        with pytest.raises(UnknownValueError, match="Pass values='real' to the trace"):
            decide(kept[:2] if decide is sorted else kept[0])


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: (x > 0).sum(dim=1).tolist(),
        lambda x: (x > 0).sum(dim=1).numpy(),
        lambda x: range((x > 0).sum().item()),
        lambda x: x[: (x > 0).sum().item()],
        lambda x: int((x > 0).sum()),
        lambda x: int((x > 0).sum().item() * 2),
        lambda x: math.ceil((x > 0).sum().item() / 2),
        lambda x: torch.zeros((x > 0).sum().item() + 1),
        lambda x: int(torch.ones(4, 8, dtype=torch.bool).copy_(x > 0).sum()),
    ],
    ids=["list", "array", "range", "slice", "int", "product", "ceil", "tensor", "written"],
)
def test_unknown_sizes_raise_with_the_line(ask):
    with pytest.raises(UnknownValueError) as raised:
        trace(lambda: ask(torch.randn(4, 8)), values="none")
    assert re.match(r".*test_known_values\.py:\d+", str(raised.value))
    assert "Trace with values='auto'" in str(raised.value)


def test_accuracy_is_added_up_and_told() -> None:
    told: list[str] = []

    def program() -> None:
        correct, total = 0, 0
        for _ in range(2):
            predicted = torch.randn(4, 8).argmax(dim=1)
            correct += (predicted == torch.arange(4)).sum().item()
            total += 4
            told.append(f"{correct}/{total} {correct:d} {100 * correct / total:.1f} {correct < 5}")
        told.append(str(round(correct / total, 3)))

    (warning,) = trace(program, values="none").warnings
    assert "test_known_values.py" in warning
    assert told == ["?/4 ? nan True", "?/8 ? nan True", "?"]


@in_a_trace(values="none")
def test_values_that_leave_torch_are_ones_and_positions_the_first(device: str) -> None:
    x = torch.randn(2, 3, device=device)
    best = torch.cat([x.argmax(1), x.topk(2)[1][:, 0]]).cpu()
    assert x.tolist() == x.cpu().numpy().tolist() == [[1.0] * 3] * 2
    assert (best.numpy().tolist(), best[0].item()) == ([0] * 4, 0)
    assert (x.numpy(force=True).shape, np.asarray(x.cpu()).sum()) == ((2, 3), 6.0)
    assert set(torch.multinomial(torch.ones(64, device=device), 64, True).tolist()) == {0}


def test_an_array_keeps_the_storage_alive() -> None:
    def program() -> object:
        array = torch.randn(1000).numpy()
        torch.randn(500)
        return array

    for figures in (trace(program), measure(program)):
        assert (figures.peak, figures.end) == (6000, 4000)


@in_a_trace(values="none")
def test_libraries_that_read_and_write_at_an_address(device: str) -> None:
    x, mask = torch.randn(1000, device=device), torch.ones(10, dtype=torch.bool, device=device)
    assert x[10:].data_ptr() == x.untyped_storage().data_ptr() + 40
    assert ctypes.string_at(x.data_ptr(), 4000) == bytes(4000)
    ctypes.memset(x.data_ptr(), 1, 4000)
    assert ctypes.string_at(mask.data_ptr(), 10) == bytes([1] * 10)


def saved_and_loaded(device: str) -> None:
    model = nn.Linear(100, 100).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 100, device=device)).sum().backward()
    optimizer.step()
    state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert state["model"]["weight"].device == model.weight.device
    assert state["model"]["weight"].stride() == (100, 1)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.step()
    pickle.loads(pickle.dumps(model))(torch.ones(2, 100, device=device))


def test_checkpoints_are_written_and_read() -> None:
    figures, real = trace(saved_and_loaded, "cpu", host="here"), measure(saved_and_loaded, "cpu")
    # torch's profiler does not see the file, which lies in Python's memory.
    assert figures.figures() == real.figures() | {"host_peak": figures.host_peak}
    # Two models, with gradients and the two momentums of the first, and one that is read again.
    parameters, buffers = 4 * (100 * 100 + 100), 2 * 8_519_680
    assert trace(saved_and_loaded, "cuda", device="cuda").peak == 7 * parameters + buffers


def gradients_of_samples(model: nn.Module, x: Tensor) -> list[Tensor]:
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (x[None],)).square().sum()

    return [*torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x).values()]


def test_parameters_given_by_torch_func() -> None:
    as_measured(lambda: gradients_of_samples(nn.Linear(10, 10), torch.randn(4, 10)))


def test_gradients_of_samples_by_vmap_are_known() -> None:
    """``vmap`` gives the gradient of a convolution's weight an empty weight."""
    model, x = nn.Conv2d(2, 3, 3), torch.randn(4, 2, 8, 8)

    def norms() -> list[float]:
        return [one.norm().item() for one in gradients_of_samples(model, x)]

    assert result_of(norms, values="real") == pytest.approx(norms())


@in_a_trace()
def test_values_written_by_composites_and_to_outputs_are_known() -> None:
    flags = torch.tensor([True, False]).logical_and_(torch.tensor([True, True]))
    assert flags.tolist() == [True, False]
    total = torch.zeros(2, dtype=torch.int64)
    torch.add(torch.tensor([1, 2]), torch.tensor([3, 4]), out=total)
    assert total.tolist() == [4, 6]
    if TORCH_VERSION < (2, 15):  # later ones read values without an operator
        torch.randn(3000).quantile(0.5)  # checks that 0.5 is between 0 and 1


def initialised(deviation: float, *bounds: float) -> None:
    layer = nn.Linear(64, 64)
    nn.init.trunc_normal_(layer.weight, 0.0, deviation, *bounds)
    nn.init.orthogonal_(layer.weight)
    layer(torch.ones(2, 64)).sum().backward()


WIDE, NARROW = partial(initialised, 0.02, -2.0, 2.0), partial(initialised, 1.0, 3.0, 4.0)


@pytest.mark.parametrize("program", [WIDE, NARROW], ids=["wide", "narrow"])
def test_initialisers(program: Callable[[], None]) -> None:
    assert trace(program, host="here").figures() == measure(program).figures()


def test_initialisers_that_draw_again() -> None:
    found = differences(trace(NARROW, host="here", values="none"), measure(NARROW))
    assert found == {"forward_peak": -5568, "peak": -5568}


def test_one_hot_of_classes_that_are_not_known() -> None:
    """A router's choice, in a given number of classes, has a shape that is known."""

    def program() -> None:
        logits = torch.randn(3, 7, requires_grad=True)
        chosen = nn.functional.one_hot(logits.argmax(-1), num_classes=7)
        (chosen * logits.softmax(-1)).sum().backward()

    as_measured(program)
    with pytest.raises(UnknownValueError):
        trace(lambda: nn.functional.one_hot(torch.randn(3, 7).argmax(-1)), values="none")


@pytest.mark.parametrize("time", [1, 2])
@in_a_trace(values="real")
def test_what_is_made_of_numbers_is_made_anew_each_time(time: int) -> None:
    for _ in range(3):
        empty, ones = torch.empty(3), torch.ones(3)
        for made in (torch.fill(empty, 1), ones, torch.slice_scatter(empty, ones)):
            assert made.tolist() == [1.0, 1.0, 1.0]
        assert torch.ops.aten.exponential(empty).sum().item() > 0
        ones.add_(1)
        for number in (0.0, -0.0, 0.0):
            made = torch.full((2,), number)
            assert torch.signbit(made).tolist() == [math.copysign(1.0, number) < 0] * 2
            made.fill_(7)
        assert torch.full((2,), 1).dtype is not torch.full((2,), 1.0).dtype


@in_a_trace(values="real")
def test_values_of_what_is_gone_take_no_memory() -> None:
    for _ in range(8):
        torch.rand(500, 500).sum()
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    assert sum(one.nbytes == 1_000_000 for one in tensors) <= 2
