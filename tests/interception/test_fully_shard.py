"""``fully_shard`` in a trace, against the real CPU allocator and a group that sends nothing."""

import gc
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, parallel
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.modules import module as modules
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.sharded_steps.programs import PROGRAMS, Decoder, shard, start, train
from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.targets.world import World


def hybrid(device: str = "cpu") -> None:
    """Sharded over two processes, replicated over two."""
    start(device)
    mesh = dist.init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(Decoder().to(device), mesh=mesh, reshard_after_forward=2)
    train(model, torch.optim.AdamW(model.parameters(), foreach=True), device=device)


def offloaded(device: str = "cpu") -> None:
    """Shards on the host, the next layer gathered ahead, clipped gradients."""
    policy = CPUOffloadPolicy(pin_memory=device != "cpu")
    model: Any = shard(Decoder(), mesh=start(device), offload_policy=policy)
    first, second, _ = model.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    optimizer = torch.optim.AdamW(model.parameters())
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    train(model, optimizer, steps=1, device=device, after_backward=clip)


NAMED = {"hybrid": hybrid, "offloaded": offloaded, **PROGRAMS}


@contextmanager
def real_process(world: World) -> Iterator[None]:
    """Be a process of a world whose collectives send nothing; everything else is real."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.environment.items():
            patch.setitem(os.environ, name, value)
        dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
        try:
            yield
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("name", ["fsdp_checkpointed", "hybrid", "offloaded", "tensor_parallel"])
def test_a_rank_needs_what_the_real_allocator_counts(name: str) -> None:
    program = NAMED[name]
    traced = trace(program, host="here", world_size=4, rank=1)
    with real_process(World(4, 1)):
        assert traced.figures() == measure(program).figures()
    assert not traced.warnings


@pytest.mark.parametrize("name", ["fsdp", "fsdp_mixed", "offloaded"])
def test_kinds_on_cuda_tell_shards_from_what_is_gathered(name: str) -> None:
    profile = trace(NAMED[name], "cuda", device="cuda", world_size=8, rank=7)
    assert not profile.warnings
    kinds = profile.by_kind("backward")
    assert kinds["all-gathered parameter"] > 0
    assert profile.by_kind("forward")["communication buffer"] > 0
    whole = sum(one.numel() * one.element_size() for one in Decoder().parameters())
    held = kinds.get("parameter", 0)
    assert held == 0 if name == "offloaded" else whole / 8 <= held < whole / 4


def test_a_shard_gets_smaller_with_the_world() -> None:
    ends = [trace(PROGRAMS["fsdp_meta"], world_size=size).end for size in (1, 2, 4)]
    assert ends[0] > 1.9 * ends[1] > 3.6 * ends[2]


def split_sequence(device: str = "cpu") -> None:
    """Attention over parts of a sequence, which needs a GPU's."""
    mesh: Any = start("cuda")
    model, tokens = Decoder(1).to("cuda", torch.bfloat16), torch.randint(256, (2, 128)).cuda()
    with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
        model(tokens).float().sum().backward()


def experts(device: str = "cpu") -> None:
    """Tokens go to the processes of their experts and back; nobody waits for a sum of them."""
    start(device)
    group, size = dist.group.WORLD, dist.get_world_size()
    expert, parts = nn.Linear(8, 8).to(device), [4] * size
    tokens = torch.ones(4 * size, 8, device=device, requires_grad=True)
    there = functional.all_to_all_single_autograd(tokens, parts, parts, group)
    functional.all_to_all_single_autograd(expert(there), parts, parts, group).sum().backward()
    torch.ops._c10d_functional.all_reduce(tokens.detach(), "sum", group.group_name)


class Stopped(Exception):
    """Ends a program in its middle."""


def _stopped_at(program: Any, device: str, calls: int) -> None:
    """Run a program until as many modules were called, or went backward, or steps were made."""
    seen = iter(range(calls))

    def count(*_: Any) -> None:
        if next(seen, None) is None:
            raise Stopped

    def count_backward(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(count)

    register_module_forward_pre_hook(count)
    register_module_forward_hook(count_backward)
    register_optimizer_step_pre_hook(count)
    program(device)


def test_nothing_of_it_outlives_the_trace() -> None:
    kinds = (DTensor, DeviceMesh, dist.ProcessGroup)

    def there() -> Any:
        gc.collect()
        works = torch._C._distributed_c10d._get_work_registry_size()
        tables = [len(getattr(distributed_c10d, name)) for name in ("_pg_map", "_tags_to_pg")]
        of_all = (one for name, one in vars(modules).items() if name.startswith("_global_"))
        hooks = [len(one) for one in of_all if isinstance(one, dict)]
        return dict(os.environ), dist.is_initialized(), works, tables, hooks, sys.excepthook

    trace(NAMED["fsdp_mixed"], world_size=2)
    gc.collect()
    known = {id(one) for one in gc.get_objects() if issubclass(type(one), kinds)}
    before, seed = there(), random.randrange(1 << 32)
    draw = random.Random(seed)
    programs = [*NAMED.values(), experts, split_sequence]
    for _ in range(6):
        program, calls = draw.choice(programs), draw.choice([3, 12, 30, 9999])
        device = "cuda" if program is split_sequence else draw.choice(["cpu", "cuda"])
        where = {"device": device, "world_size": 4, "rank": draw.randrange(4)}
        # A pipeline says in an error of its own that it was stopped.
        with suppress(Stopped, RuntimeError) if calls < 9999 else nullcontext():
            trace(_stopped_at, program, device, calls, **where)
        assert there() == before, (seed, program.__name__, where, calls)
        left = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
        assert not [type(one) for one in left if id(one) not in known], (seed, program, where)


def _adapted(model: Any, device: str) -> Any:
    model.head = nn.Linear(64, 256, bias=False)  # a part of it is the trace's own
    return shard(model.to(device), mesh=start(device))


def _checkpointed(model: Any, device: str) -> Any:
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.norm.register_forward_hook(lambda *_: None)
    return shard(model, mesh=start(device))  # which moves its parameters itself


def _replicated(model: Any, device: str) -> Any:
    start(device)
    return replicate(model.to(device))


def _parallel(model: Any, device: str) -> Any:
    layouts = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    whole = parallel.PrepareModuleInput(**layouts, use_local_output=True)
    plan = {"": whole, "up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    parallel.parallelize_module(model.to(device).layers[0], start(device), plan)
    return model


def _reparametrized(model: Any, device: str) -> Any:
    weight_norm(model.layers[0].up)
    return shard(model.to(device), mesh=start(device))


CHANGES = [_adapted, _checkpointed, _parallel, _replicated, _reparametrized]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_from_outside_is_given_back(change: Any, device: str) -> None:
    model = Decoder(1, tied=change is _parallel)
    model.norm.weight.kept = True
    held = model.layers[0].up.weight
    before = {name: one.clone() for name, one in model.state_dict().items()}

    def program() -> None:
        adapted = change(model, device)
        optimizer = torch.optim.SGD(adapted.parameters(), 0.1, foreach=False)
        train(adapted, optimizer, steps=1, device=device)

    found = [trace(program, device=device, world_size=2, rank=rank).figures() for rank in (0, 1, 0)]
    assert found[0] == found[1] == found[2]
    assert {type(one) for one in model.modules()} == {type(one) for one in Decoder(1).modules()}
    assert model.layers[0].up.weight is held
    assert model.norm.weight.kept
    assert (model.head.weight is model.embedding.weight) is (change is _parallel)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    assert held.grad is not None


def test_what_is_sharded_of_a_model_from_outside_is_freed() -> None:
    def program(model: nn.Module) -> Any:
        return lambda: train(shard(model, mesh=start()), torch.optim.SGD(model.parameters(), 0.1))

    model = Decoder(1)
    traced = trace(program(model), host="here", world_size=4, rank=1)
    with real_process(World(4, 1)):
        measured = measure(program(model))
    assert traced.end == measured.end
    assert traced.forward_peak == measured.forward_peak  # the second step's


def test_resized_storages_are_freed_and_requested() -> None:
    def program() -> None:
        held = torch.empty(1 << 20)
        storage = held.untyped_storage()
        storage.resize_(0)
        assert storage.size() == storage.nbytes() == 0
        other = torch.empty(1 << 20)
        del other
        storage.resize_(1 << 22)
        assert storage.size() == 1 << 22
        assert held.shape == (1 << 20,)

    assert trace(program).figures() == measure(program).figures()
    assert trace(program).peak == 1 << 22
    with pytest.raises(UnsupportedOperatorError, match="more bytes than the storage"):
        trace(lambda: torch.empty(4).untyped_storage().resize_(64))


def test_what_was_wrapped_before_is_refused() -> None:
    with real_process(World(2, 0)):
        model = fully_shard(nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (2,)))
        with pytest.raises(UnsupportedOperatorError, match="wrapped for several processes before"):
            trace(model, torch.randn(2, 4))
        with pytest.raises(UnsupportedOperatorError, match="wrapped for several processes before"):
            trace(lambda: model(torch.randn(2, 4)), world_size=2)


def test_facts_say_how_modules_are_sharded() -> None:
    def step() -> None:
        mesh = start("cuda")
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model[0], mesh=mesh, mp_policy=half, reshard_after_forward=False)
        fully_shard(model[2], mesh=mesh, mp_policy=half, reshard_after_forward=2)
        model(torch.zeros(2, 8, device="cuda", dtype=torch.bfloat16))

    layers = trace(step, device="cuda", world_size=4).facts["layers"]
    given = {one.numbers: one.settings for one in layers["Sequential.*"]}
    of_both = {"param_dtype": "bfloat16", "reduce_dtype": "None"}
    assert given["0"].items() >= {"reshard_after_forward": False, **of_both}.items()
    assert given["2"].items() >= {"reshard_after_forward": 2, **of_both}.items()


def test_a_compiled_model_has_the_graphs_of_a_real_process() -> None:
    sizes: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    def program() -> None:
        torch.compiler.reset()
        model = torch.compile(shard(Decoder(1), mesh=start()), backend=count)
        model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()

    with real_process(World(2, 0)):
        program()
    real = sizes.copy()
    sizes.clear()
    assert not trace(program, world_size=2).warnings
    assert sizes == real != []
