"""The real step: figures counted by hand, and a user's model that stays as it was."""

import copy
import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pytest_torchmem as torchmem
from pytest_torchmem.errors import UsageError
from pytest_torchmem.measurement.timeline import MemoryEvent, with_other_threads
from pytest_torchmem.profile.timeline import Kind, Phase
from tests.modules import Parts

FLOAT = 4


def test_the_figures_of_two_multiplications_counted_by_hand() -> None:
    class Squares(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight) * self.weight

    vector = 1000 * FLOAT
    model = Squares(weight=nn.Parameter(torch.randn(1000)))
    profile = torchmem.measure(model, torch.randn(1000), loss_fn=torch.sum)
    assert profile.baseline == 2 * vector
    # Two products, their sum, and the gradient backward() begins with.
    assert profile.retained == profile.baseline + 2 * vector + 2 * FLOAT
    assert profile.forward_peak == profile.baseline + 2 * vector + FLOAT + FLOAT
    # sum() only expands its gradient, so backward needs no more than three further products.
    assert profile.retained < profile.backward_peak <= profile.retained + 3 * vector
    # Parameter, input, gradient of the parameter.
    assert profile.end == 3 * vector
    assert profile.optimizer_peak is None
    assert (profile.device, profile.host) == ("cpu", "here")


def test_the_gradient_that_is_left_and_the_optimizer_state_have_names() -> None:
    model = nn.Linear(64, 32)
    profile = torchmem.measure(model, torch.randn(8, 64), optimizer=torch.optim.Adam)
    left = profile.timeline.live_at(len(profile.timeline.events))
    by_kind = Counter[Kind]()
    for allocation in left:
        by_kind[allocation.kind] += allocation.nbytes
    parameters = (64 * 32 + 32) * FLOAT
    assert (by_kind[Kind.PARAMETER], by_kind[Kind.GRADIENT]) == (parameters, parameters)
    assert by_kind[Kind.OPTIMIZER_STATE] == 2 * parameters + 2 * FLOAT
    assert by_kind[Kind.INPUT] == 8 * 64 * FLOAT
    assert {a.label for a in left if a.kind is Kind.PARAMETER} == {"weight", "bias"}
    assert profile.optimizer_peak >= profile.end


def test_tied_weights_and_views_of_one_storage_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(2048)
            self.first = nn.Parameter(flat[:1024].view(32, 32))
            self.second = nn.Parameter(flat[1024:].view(32, 32))
            self.third = self.first
            self.register_buffer("mask", torch.ones(32), persistent=False)
            self.table = torch.zeros(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.first @ self.second + self.third.sum() + self.table.sum()

    profile = torchmem.measure(Tied(), torch.randn(4, 32))
    assert profile.baseline == (2048 + 32 + 64 + 4 * 32) * FLOAT


def test_gradients_from_earlier_steps_are_there_and_are_added_to() -> None:
    model = nn.Linear(100, 1, bias=False)
    model.weight.grad = torch.ones(1, 100)
    profile = torchmem.measure(model, torch.randn(1, 100))
    assert (profile.baseline, profile.end) == (3 * 100 * FLOAT, profile.baseline)
    assert torch.equal(model.weight.grad, torch.ones(1, 100))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    ("layout", "indices"), [(torch.sparse_coo, 2 * 8), (torch.sparse_csr, 9 + 2 * 8)]
)
def test_sparse_inputs_are_copied(layout: torch.layout, indices: int) -> None:
    # The columns of the second are a row of the indices that a matrix by coordinates has.
    matrix = torch.eye(8).to_sparse(layout=layout)

    class Product(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    profile = torchmem.measure(Product(8, 8, bias=False), matrix)
    assert profile.baseline == 8 * 8 * FLOAT + 8 * FLOAT + 8 * indices


def test_inputs_that_share_a_storage_count_once() -> None:
    base = torch.randn(10, 100)

    class Sum(nn.Module):
        def forward(self, first: torch.Tensor, rest: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            return first + rest["many"][0] + rest["many"][1]

    profile = torchmem.measure(Sum(), base[0], rest={"many": [base[1], base[2]]}, backward=False)
    assert profile.baseline == base.untyped_storage().nbytes()
    assert profile.retained == profile.baseline + 100 * FLOAT
    assert profile.backward_peak is None


def test_a_parameter_that_is_released_during_the_step_is_struck_off() -> None:
    class Frees(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = torch.empty(0)
            return x * self.other

    model = Frees(weight=nn.Parameter(torch.randn(5000)), other=nn.Parameter(torch.randn(10)))
    profile = torchmem.measure(model, torch.randn(10), backward=False)
    assert (profile.baseline, profile.end) == (5020 * FLOAT, 30 * FLOAT)


def test_a_storage_that_is_resized_during_the_step_has_its_new_size() -> None:
    class Resizes(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.untyped_storage().resize_(0)
            self.weight.untyped_storage().resize_(8000)
            return x

    model = Resizes(weight=nn.Parameter(torch.randn(5000)))
    assert torchmem.measure(model, torch.randn(10), backward=False).end == 8000 + 10 * FLOAT


def test_memory_from_before_the_recording_does_not_disturb_it() -> None:
    held = [torch.randn(1000)]

    def step() -> None:
        held.clear()
        held.append(torch.randn(10))

    profile = torchmem.measure(step)
    assert (profile.baseline, profile.peak) == (0, 10 * FLOAT)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_model_is_left_as_it_was(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    before = {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    values = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    state, python_state = torch.get_rng_state(), random.getstate()
    torchmem.measure(model, x, optimizer=torch.optim.SGD, steps=2)
    after = {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    assert after == before
    if device == "cpu":
        for name, value in model.state_dict().items():
            assert torch.equal(value, values[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert gc.isenabled()


def test_a_step_that_raises_leaves_everything_as_it_was() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(3)
            raise ZeroDivisionError("in the model")

    engine = torch.autograd.Variable._execution_engine
    x = torch.randn(3)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="in the model"):
        torchmem.measure(Raises(), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.autograd.Variable._execution_engine is engine
    assert gc.isenabled()
    assert torchmem.measure(nn.Linear(2, 2), torch.randn(1, 2)).peak > 0


def test_phases_of_a_callable_are_found() -> None:
    def step() -> torch.Tensor:
        weight = torch.randn(100, requires_grad=True)
        optimizer = torch.optim.SGD([weight], momentum=0.9)
        (weight * 2).sum().backward()
        big = torch.empty(10_000)
        del big
        optimizer.step()
        (grad,) = torch.autograd.grad((weight * weight).sum(), weight)
        return grad

    profile = torchmem.measure(step)
    names = [phase for _, phase in profile.timeline.phases]
    first = [Phase.BASELINE, Phase.FORWARD, Phase.BACKWARD, Phase.BETWEEN, Phase.OPTIMIZER]
    assert names == [*first, Phase.BETWEEN, Phase.BACKWARD, Phase.BETWEEN]
    between = profile.timeline.peaks()[Phase.BETWEEN][0]
    assert between == profile.peak > 10_000 * FLOAT
    assert profile.forward_peak < 10_000
    assert profile.end == 100 * FLOAT


def test_output_and_loss_live_until_their_step_ends() -> None:
    outputs, seen = list[weakref.ref[torch.Tensor]](), list[bool]()

    class Remembers(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend(reference() is not None for reference in outputs)
            output = super().forward(x)
            outputs.append(weakref.ref(output))
            return output

    class Looks(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            seen.append(outputs[-1]() is not None)
            super().step()

    x = torch.randn(2, 3)
    torchmem.measure(Remembers(3, 3), x, optimizer=lambda p: Looks(p, lr=0.1), steps=2)
    # Alive in the first optimizer step, dead in the second forward, alive in the second step.
    assert seen == [True, False, True]


def test_the_recorded_operators_are_those_that_took_the_memory() -> None:
    profile = torchmem.measure(lambda: torch.randn(8, 8).t().contiguous().softmax(0))
    operators = [a.origin.operator for a in profile.timeline.allocations]
    assert operators == ["aten::randn", "aten::clone", "aten::_softmax"]


def test_it_says_what_it_cannot_see() -> None:
    warnings = torchmem.measure(nn.Linear(2, 2), torch.randn(1, 2)).warnings
    assert any("other threads" in warning for warning in warnings)
    assert torch.backends.mkl.is_available() == any("MKL" in warning for warning in warnings)


def on_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_what_other_threads_take_is_seen_while_it_is_there() -> None:
    def step() -> None:
        kept: list[torch.Tensor] = []
        on_a_thread(lambda: torch.empty(1_000_000))
        on_a_thread(lambda: kept.append(torch.empty(1_000)))
        torch.empty(10)
        on_a_thread(kept.clear)
        torch.empty(2_000)

    assert torchmem.measure(step).peak == 4 * 2_000


def test_what_a_worker_has_in_the_course_of_an_operator_is_chance() -> None:
    kernel, worker = ("aten::attention",), ("another thread",)
    recorded = [
        MemoryEvent(0, 50, 1, ("aten::empty",), 50),
        MemoryEvent(1, 96, 2, (*kernel, "aten::empty"), 146),
        MemoryEvent(2, -96, 2, kernel, 146),  # 96 of a worker
        MemoryEvent(3, 8, 3, kernel, 58),
        MemoryEvent(4, 10, 4, ("aten::empty",), 98),  # 30 of another thread, and
        MemoryEvent(5, -50, 1, (), 48),
        MemoryEvent(6, 1, 5, ("aten::empty",), 19),  # they are gone
    ]
    found = with_other_threads(recorded)
    others = [event for event in found if event.path == worker]
    assert [event.nbytes for event in others] == [30, -30]
    assert sum(event.nbytes for event in found) == 19


def test_files_that_are_mapped_have_no_total() -> None:
    path = ("aten::empty",)
    recorded = [
        MemoryEvent(0, 10_000, 1, path, 0),
        MemoryEvent(1, 200, 2, path, 600),
        MemoryEvent(2, -10_000, 1, path, 0),
        MemoryEvent(3, -300, 9, path, 0),  # one from before
        MemoryEvent(4, 8, 3, path, 608),
    ]
    assert with_other_threads(recorded) == recorded


def test_a_block_that_another_thread_puts_in_the_place_of_one_as_large_is_released() -> None:
    def step() -> None:
        held = [torch.empty(1_000), torch.empty(5)]
        on_a_thread(held.pop)
        torch.empty(10)
        on_a_thread(lambda: (held.append(torch.empty(1_000)), held.pop(0)))
        torch.empty(10)
        held.clear()
        torch.empty(500)

    profile = torchmem.measure(step)
    assert (profile.peak, profile.end) == (4 * 1_010, 0)


def test_what_other_threads_release_is_gone() -> None:
    def step() -> list[torch.Tensor]:
        kept = [torch.empty(1000)]
        for _ in range(3):
            buffers = [torch.empty(2500), torch.empty(700), torch.empty(700)]
            on_a_thread(buffers.clear)
        return [*kept, torch.empty(300)]

    profile = torchmem.measure(step)
    assert (profile.peak, profile.end) == (4 * (1000 + 2500 + 700 + 700), 4 * (1000 + 300))


SGD, ROW = torch.optim.SGD, torch.rand(1, 2)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((nn.Linear(2, 2),), {"device": "tpu"}, "expected 'cpu' or 'cuda'"),
        ((nn.Linear(2, 2),), {"device": "cuda"}, "device='cuda'"),
        ((3,), {}, "expected an nn.Module or a callable, not int"),
        ((torch.rand, 3), {"optimizer": SGD}, "optimizer= only"),
        ((nn.Linear(2, 2), ROW), {"steps": 0}, "steps=0"),
        ((nn.Flatten(), ROW), {}, "holds no floating tensor that requires grad"),
        ((nn.Linear(2, 2), ROW), {"backward": False, "optimizer": SGD}, "leave backward=True"),
    ],
)
def test_errors_say_what_to_do(given, options, message):
    with pytest.raises(UsageError, match=message):
        torchmem.measure(*given, **options)


def test_the_state_of_an_optimizer_may_be_in_tensors_of_tensors() -> None:
    """As those of 8-bit optimizers are, whose own storage cannot be asked where it lies."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Doubled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    halves = torch.zeros_like(parameter), torch.zeros_like(parameter)
                    self.state[parameter]["both"] = TwoTensor(*halves)

    profile = torchmem.measure(nn.Linear(8, 8), torch.ones(2, 8), optimizer=Doubled)
    assert profile.by_kind("optimizer")[Kind.OPTIMIZER_STATE.value] == 2 * (8 * 8 + 8) * 4
