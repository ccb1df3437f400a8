"""Every collective of ``torch.distributed`` traces, and gives tensors of the right shapes."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard

from pytest_torchmem import trace
from pytest_torchmem.errors import UnknownValueError
from tests.processes import group_of_one, run_program

ROWS = 8
OPERATORS: Any = torch.ops._c10d_functional


class Process:
    """What a collective is given: tensors on a device, and the process's place in the world."""

    def __init__(self, device: str, asynchronous: bool) -> None:
        self.device, self.asynchronous = device, asynchronous
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.group: Any = dist.group.WORLD
        self.beside = (self.rank + 1) % self.size

    def part(self, rows: int = ROWS) -> Tensor:
        return torch.ones(rows, 4, device=self.device)

    def whole(self) -> Tensor:
        return self.part(ROWS * self.size)

    def parts(self) -> list[Tensor]:
        return [self.part() for _ in range(self.size)]

    def at_first(self, objects: list[Any]) -> list[Any] | None:
        """Return objects that only the first process has."""
        return objects if self.rank == 0 else None

    def run(self, collective: Any, *args: Any, **kwargs: Any) -> None:
        """Run a collective to its end."""
        work = collective(*args, **kwargs, async_op=self.asynchronous)
        assert (work is not None) == self.asynchronous
        if work is not None:
            work.wait()
            assert work.done() if not isinstance(work, dist.Work) else work.is_completed()

    def coalesced(self, collective: Any, *pairs: tuple[Tensor, ...]) -> None:
        """Run collectives together."""
        device = torch.device(self.device, 0) if self.device == "cuda" else None
        with dist._coalescing_manager(device=device, async_ops=self.asynchronous) as manager:
            for pair in pairs:
                collective(*pair)
        if self.asynchronous:
            manager.wait()


def into(name: str, output: str, *inputs: str, **options: Any) -> Callable[[Process], Tensor]:
    """Return a call that writes to its first argument."""

    def call(process: Process) -> Tensor:
        made = getattr(process, output)()
        arguments = [getattr(process, one)() for one in inputs]
        process.run(getattr(dist, name), made, *arguments, **options)
        return made[-1] if isinstance(made, list) else made

    return call


def uneven(process: Process) -> Tensor:
    splits = list(range(1, process.size + 1))
    made, given = process.part(sum(splits)), process.part(sum(splits))
    process.run(dist.all_to_all_single, made, given, splits, splits)
    return made[:ROWS].expand(ROWS, 4) if process.size == 1 else made


def lists(process: Process) -> Tensor:
    made = [[process.part(), process.part()] for _ in range(process.size)]
    process.run(dist.all_gather_coalesced, made, made[0])
    return made[-1][1]


def gathered(process: Process) -> Tensor:
    process.run(dist.gather, process.part(), process.at_first(process.parts()))
    return process.part()


def scattered(process: Process) -> Tensor:
    made = process.part()
    process.run(dist.scatter, made, process.at_first(process.parts()))
    return made


def reduced_together(process: Process) -> Tensor:
    made = process.part()
    process.coalesced(dist.all_reduce, (made,), (process.part(),))
    process.run(dist.all_reduce_coalesced, [made])
    return made


def gathered_together(process: Process) -> Tensor:
    pairs = [(process.whole(), process.part()) for _ in range(2)]
    process.coalesced(dist.all_gather_into_tensor, *pairs)
    return pairs[0][0]


def scattered_together(process: Process) -> Tensor:
    pairs = [(process.part(), process.whole()) for _ in range(2)]
    process.coalesced(dist.reduce_scatter_tensor, *pairs)
    return pairs[0][0]


def to_neighbour(process: Process) -> Tensor:
    made = process.part()
    if process.size > 1:
        dist.send(made, process.beside)
        dist.recv(made, process.beside)
        assert dist.recv(made) != process.rank
        operations = [dist.P2POp(one, made, process.beside) for one in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        name = process.group.group_name
        made = OPERATORS.wait_tensor(OPERATORS.irecv(made, process.beside, 0, name))
    return made


def marks(process: Process) -> Tensor:
    process.run(dist.barrier)
    made = process.part()
    torch.ops.c10d.check_for_nan(made)
    work = dist.all_reduce(made, async_op=True)
    halves = work.get_future().then(lambda future: future.value()[0] / 2)
    return halves.wait()


def subgroups(process: Process) -> Tensor:
    made, group = process.part(), dist.new_group(list(range(process.size)))
    alone, _ = dist.new_subgroups(group_size=1)
    for one in (group, alone):
        dist.all_reduce(made, group=one)
    dist.destroy_process_group(group)
    store = dist.distributed_c10d._get_default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    return made


def in_place(process: Process) -> Tensor:
    name = process.group.group_name
    made = OPERATORS.all_reduce_(process.part(), "sum", name)
    made = OPERATORS.broadcast_(made, 0, name)
    (made,) = OPERATORS.all_reduce_coalesced_([made], "sum", name)
    own = process.part()
    whole = OPERATORS.all_gather_into_tensor_out(own, process.size, name, out=process.whole())
    OPERATORS.reduce_scatter_tensor_out(whole, "sum", process.size, name, out=own)
    return OPERATORS.wait_tensor(made)


def backward(name: str, several: bool = False) -> Callable[[Process], Tensor]:
    """Return a call of a collective that autograd goes through."""

    def call(process: Process) -> Tensor:
        given = [one.requires_grad_() for one in process.parts()]
        made = getattr(differentiable, name)(
            *([process.part()] if name.startswith(("reduce_s", "all_to_all_s")) else []),
            *([process.parts()] if name == "all_to_all" else []),
            given if several else given[0],
            *([0] if name in ("broadcast", "gather", "scatter", "reduce") else []),
        )
        parts = [made] if isinstance(made, Tensor) else list(made)
        sum(one.sum() for one in parts).backward()
        assert given[0].grad is not None
        return parts[-1]

    return call


def functional_call(name: str, whole: bool, *args: Any) -> Callable[[Process], Tensor]:
    """Return a call of a collective that returns its output."""

    def call(process: Process) -> Tensor:
        given: Any = process.whole() if whole else process.part()
        together = name.endswith("coalesced")
        made = getattr(functional, name)([given] if together else given, *args, process.group)
        return made[0] if together else made

    return call


PART: dict[str, Callable[[Process], Tensor]] = {
    "all_reduce": into("all_reduce", "part"),
    "average": into("all_reduce", "part", op=dist.ReduceOp.AVG),
    "broadcast": into("broadcast", "part", src=0),
    "reduce": into("reduce", "part", dst=0),
    "all_gather": into("all_gather", "parts", "part"),
    "reduce_scatter": into("reduce_scatter", "part", "parts"),
    "reduce_scatter_tensor": into("reduce_scatter_tensor", "part", "whole"),
    "all_to_all": into("all_to_all", "parts", "parts"),
    "all_to_all_single": into("all_to_all_single", "part", "part"),
    **{one.__name__: one for one in (lists, gathered, scattered, reduced_together)},
    **{one.__name__: one for one in (scattered_together, to_neighbour, marks, subgroups, in_place)},
    "f all_reduce": functional_call("all_reduce", False, "sum"),
    "f all_reduce_coalesced": functional_call("all_reduce_coalesced", False, "sum"),
    "f broadcast": functional_call("broadcast", False, 0),
    "f reduce_scatter_tensor": functional_call("reduce_scatter_tensor", True, "sum", 0),
    "f reduce_scatter_autograd": functional_call("reduce_scatter_tensor_autograd", True, "sum", 0),
    "f reduce_scatter_lists": functional_call("reduce_scatter_tensor_coalesced", True, "sum", [0]),
    "f all_to_all_single": functional_call("all_to_all_single", False, None, None),
    "f all_to_all_autograd": functional_call("all_to_all_single_autograd", False, None, None),
    **{f"n {name}": backward(name) for name in ("all_reduce", "all_gather", "broadcast")},
    **{f"n {name}": backward(name) for name in ("gather", "reduce", "all_to_all_single")},
    **{f"n {name}": backward(name, True) for name in ("scatter", "reduce_scatter", "all_to_all")},
}
WHOLE: dict[str, Callable[[Process], Tensor]] = {
    "all_gather_into_tensor": into("all_gather_into_tensor", "whole", "part"),
    "gathered_together": gathered_together,
    "f all_gather_tensor": functional_call("all_gather_tensor", False, 0),
    "f all_gather_autograd": functional_call("all_gather_tensor_autograd", False, 0),
    "f all_gather_coalesced": functional_call("all_gather_into_tensor_coalesced", False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [1, 2, 8])
def test_every_collective_has_its_shapes(device: str, size: int) -> None:
    def program() -> None:
        dist.init_process_group()
        for asynchronous in (False, True):
            process = Process(device, asynchronous)
            for calls, rows in ((PART, ROWS), (WHOLE, ROWS * size)):
                for name, call in calls.items():
                    made = call(process) + 0  # waits
                    assert made.shape == (rows, 4), (name, made.shape)
                    assert made.device.type == device, name
            uneven(process)

    for rank in {0, size - 1}:
        assert not trace(program, device=device, world_size=size, rank=rank, values="none").warnings


@pytest.mark.parametrize("rank", [0, 3])
def test_objects_of_others(device: str, rank: int) -> None:
    """What all have is that of this process, with a warning; what one sends is asked of it."""

    def program() -> None:
        dist.init_process_group()
        own_rank = dist.get_rank()
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(gathered, {"loss": 1.5})
        assert gathered == [{"loss": 1.5}] * 4
        sent = [None, None] if own_rank else ["a", {"b": 2}]
        dist.broadcast_object_list(sent, 0)
        assert sent == ["a", {"b": 2}]
        at_first: Any = None if own_rank else [None] * 4
        dist.gather_object("x", at_first)
        assert at_first == (None if own_rank else ["x"] * 4)
        own: list[Any] = [None]
        texts = ["x" * (10 * rank + 1) for rank in range(4)]
        dist.scatter_object_list(own, None if own_rank else texts)
        assert own == [texts[own_rank]]
        sevens = torch.full((3,), 1 if own_rank else 7, device=device)
        assert functional.broadcast(sevens, 0, dist.group.WORLD).tolist() == [7, 7, 7]
        flag = torch.tensor([0 if own_rank else 7], device=device)
        dist.broadcast(flag, 0)
        assert torch.ones(int(flag)).numel() == 7

    warnings = trace(program, device=device, world_size=4, rank=rank).warnings
    assert any("what other processes have is not known" in one for one in warnings)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_state_of_a_generator_is_sent(rank: int) -> None:
    """C++ reads it without an operator, and fails of what is not there."""

    def program() -> None:
        dist.init_process_group()
        generator = torch.Generator()
        if not dist.get_rank():
            generator.manual_seed(77)
        state = generator.get_state().cuda()
        dist.broadcast(state, 0)
        generator.set_state(state.cpu())
        assert generator.initial_seed() == 77

    assert trace(program, device="cuda", world_size=2, rank=rank).warnings == ()


def test_a_program_that_fails_without_what_nobody_sends_says_how() -> None:
    def program() -> None:
        dist.init_process_group()
        if dist.get_rank():
            lengths = torch.tensor([0])
            dist.broadcast(lengths, 0)
            raise OSError("there is no such file")

    with pytest.raises(UnknownValueError, match="OSError: there is no such file"):
        trace(program, device="cpu", world_size=2, rank=1)


def test_a_chain_of_processes_that_send_to_the_next() -> None:
    runs: list[int] = []

    def program() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        runs.append(rank)
        size = torch.tensor([100])
        if rank:
            dist.recv(size, rank - 1)
        made = torch.ones(int(size))
        if rank < 3:
            dist.send(size * 2, rank + 1)
        made.sum()

    assert trace(program, world_size=4, rank=3).peak == 800 * 4 + 8 + 4
    assert runs == [3]  # what the earlier passes noted is forgotten
    with pytest.raises(UnknownValueError, match=r"rank 2 sends .*comes to its end without it"):
        trace(lambda: dist.init_process_group() or wait_for(2), world_size=4, rank=3)


COUNTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "histc": lambda chosen, n: torch.histc(chosen.float(), bins=n, min=0, max=n),
    "bincount": lambda chosen, n: torch.bincount(chosen, minlength=n),
}


@pytest.mark.parametrize("counted", COUNTS)
def test_tokens_whose_experts_are_not_known_are_spread_evenly(counted: str, device: str) -> None:
    def program() -> None:
        dist.init_process_group()
        gate = torch.nn.Linear(16, 4, device=device)
        fully_shard(gate)  # what it computes depends on what other processes have
        chosen = gate(torch.randn(66, 16, device=device)).topk(1).indices.flatten()
        assert COUNTS[counted](chosen, 4).int().tolist() == [17, 17, 16, 16]

    warnings = trace(program, device=device, world_size=4).warnings
    (even,) = (one for one in warnings if "they are taken to be spread evenly" in one)
    assert "test_every_collective.py" in even


def wait_for(rank: int) -> None:
    """Wait for a number that only the last process asks for."""
    number = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 3:
        dist.recv(number, rank)
        range(int(number))


@pytest.mark.parametrize("counted", COUNTS)
def test_others_send_as_many_tokens_as_they_get(counted: str) -> None:
    """Experts on several processes: torchtitan's ``_token_dispatch``."""
    tokens, experts, width = 256, 8, 16

    def program() -> None:
        dist.init_process_group()
        x = torch.randn(tokens, width)
        chosen = torch.nn.Linear(width, experts)(x).topk(2).indices.flatten()
        counts = COUNTS[counted](chosen, experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sizes = [one.view(4, -1).sum(1).int().tolist() for one in (received, counts)]
        routed = x[chosen.argsort() // 2].requires_grad_()
        made = functional.all_to_all_single_autograd(routed, *sizes, dist.group.WORLD)
        assert made.shape == (2 * tokens, width)
        made.sum().backward()

    (warning,) = (one for one in trace(program, world_size=4).warnings if "workspace" not in one)
    assert "they are taken to have, and to send, what this one has and sends" in warning


def test_values_that_processes_put_together_are_made_of_as_many_as_this_one_has() -> None:
    """Sizes, floating numbers and truth values alike, by each reduction, and by ``fully_shard``."""

    def program(found: list[Any]) -> None:
        dist.init_process_group("gloo")
        count, most = torch.tensor(5), torch.tensor(5)
        dist.all_reduce(count)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        mean, part = torch.tensor([0.5, 2.0]), torch.empty(1)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        dist.reduce_scatter_tensor(part, torch.arange(4.0))
        pairs = [torch.zeros(2) for _ in range(4)]
        dist.all_gather(pairs, mean)
        found += [count.item(), most.item(), part.item(), torch.stack(pairs).sum().item()]
        model = fully_shard(nn.Linear(8, 8, bias=False))
        nn.init.ones_(model.weight)
        for _ in range(2):  # storages of parameters are freed and requested in between
            found.append(bool(model(torch.ones(1, 8)).sum() > 50))

    for values in ("auto", "real"):
        found: list[Any] = []
        warnings = trace(program, found, world_size=4, rank=1, values=values).warnings
        assert found[-6:] == [20, 5, 4.0, 10.0, True, True]
        # One line for each of them that is read, three of them in one line: not the means.
        assert len(warnings) == 5, warnings
        assert all("what other processes have is not known" in one for one in warnings)


def test_what_was_waited_for_is_what_was_received(device: str) -> None:
    def step() -> None:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
        given = torch.ones(1000, device=device)
        received = functional.all_reduce(given, "sum", dist.group.WORLD)
        assert (functional.wait_tensor(received) == 4).all()

    profile = trace(step, device=device, world_size=4)
    assert profile.by_operator()["_c10d_functional::all_reduce"] == 4000
    assert not any("wait" in found.origin.operator for found in profile.timeline.allocations)


@pytest.mark.parametrize(
    ("device", "name", "refused"),
    [
        ("cpu", "send", "input tensor has to be contiguous"),
        ("cpu", "all_to_all_single", "Tensors must be contiguous"),
        ("cpu", "all_reduce", ""),
        ("cuda", "send", ""),  # NCCL warns
        ("cuda", "all_reduce", "Tensors must be contiguous"),
        ("cuda", "all_to_all_single", "Tensors must be contiguous"),
        ("cuda", "reduce_scatter_tensor", "Tensors must be contiguous"),
    ],
)
def test_what_is_not_contiguous_is_refused_as_by_the_backend(device, name, refused):
    def step() -> None:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
        given = torch.ones(4, 8, device=device).t()
        made = {"all_to_all_single": 8, "reduce_scatter_tensor": 4}.get(name)
        if made is not None:
            getattr(dist, name)(torch.ones(made, 4, device=device), given)
        else:
            getattr(dist, name)(given, **({"dst": 1} if name == "send" else {}))

    with pytest.raises(Exception, match=refused) if refused else nullcontext():
        trace(step, device=device, world_size=2)


def _refused_calls() -> dict[str, Callable[[], object]]:
    def ones(*sizes: int) -> Tensor:
        return torch.ones(sizes)

    short = torch.ones(8, dtype=torch.int16)
    return {
        "stacked": lambda: dist.all_gather_into_tensor(ones(1, 8), ones(8)),
        "long": lambda: dist.all_gather_into_tensor(ones(9), ones(8)),
        "of another dtype": lambda: dist.all_gather_into_tensor(ones(8).half(), ones(8)),
        "of a dtype that gloo lacks": lambda: dist.all_gather_into_tensor(short, short.clone()),
        "too many": lambda: dist.all_gather([ones(8), ones(8)], ones(8)),
        "parts of another shape": lambda: dist.all_gather([ones(8)], ones(4, 2)),
        "gathered": lambda: dist.gather(ones(8), [ones(4, 2)], 0),
        "too many gathered": lambda: dist.gather(ones(8), [ones(8), ones(8)], 0),
        "scattered": lambda: dist.scatter(ones(8), [ones(4, 2)], 0),
        "too many scattered": lambda: dist.scatter(ones(8), [ones(8), ones(8)], 0),
        "reduced and scattered": lambda: dist.reduce_scatter_tensor(ones(8), ones(1, 8)),
        "scattered to another dtype": lambda: dist.reduce_scatter_tensor(ones(8), ones(8).half()),
        "lists to scatter": lambda: dist.reduce_scatter(ones(8), [ones(4, 2)]),
        "too many to scatter": lambda: dist.reduce_scatter(ones(8), [ones(8), ones(8)]),
        "exchanged": lambda: dist.all_to_all_single(ones(8), ones(8), [8], [7]),
        "too many splits": lambda: dist.all_to_all_single(ones(8), ones(8), [4, 4], [8]),
        "a dtype that is not reduced": lambda: dist.all_reduce(short),
        "bits of numbers": lambda: dist.all_reduce(ones(8), dist.ReduceOp.BOR),
        "bits, scattered": lambda: dist.reduce_scatter_tensor(ones(8), ones(8), dist.ReduceOp.BOR),
    }


@pytest.mark.parametrize("name", _refused_calls())
def test_what_gloo_refuses_is_refused_in_its_words(name: str) -> None:
    def step() -> None:
        dist.init_process_group("gloo")
        _refused_calls()[name]()

    with group_of_one(), pytest.raises(RuntimeError) as real:
        _refused_calls()[name]()
    with pytest.raises(RuntimeError) as traced:
        trace(step, world_size=1)
    assert str(traced.value) in str(real.value)  # some begin with a process, a time and a line


@pytest.mark.parametrize(
    ("sizes", "dtype", "refused"),
    [
        ((2, 8), torch.float32, None),  # a stack, which NCCL takes
        ((16,), torch.int16, None),
        ((15,), torch.float32, "world_size times"),
        ((16,), torch.float16, "same type"),
    ],
)
def test_what_nccl_refuses_is_refused(sizes, dtype, refused):
    def step() -> None:
        dist.init_process_group("nccl")
        given = torch.ones(8, dtype=dtype if refused is None else torch.float32, device="cuda")
        dist.all_gather_into_tensor(torch.ones(sizes, dtype=dtype, device="cuda"), given)

    with pytest.raises(Exception, match=refused) if refused else nullcontext():
        trace(step, device="cuda", world_size=2)


_ALONE = """
import sys, torch, torch.distributed as dist
from pytest_torchmem import trace
def step():
    dist.init_process_group("gloo")
    torch.ops._c10d_functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD.group_name)
assert "torch.distributed._functional_collectives" not in sys.modules
trace(step, world_size=2)
assert torch._C._distributed_c10d._get_work_registry_size() == 0
"""


def test_no_work_outlives_a_trace_of_a_functional_collective() -> None:
    # In a process of its own: who imports torch's functional collectives gets kernels for "meta".
    run_program(_ALONE)
