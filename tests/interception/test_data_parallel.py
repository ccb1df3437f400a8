"""``DistributedDataParallel`` in a trace: its own reducer in C++ runs, and makes its buckets."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.sharded_steps.programs import PROGRAMS, Decoder, start, train
from benchmarks.sharded_steps.real import without_gloo
from pytest_torchmem import measure, trace
from tests.processes import group_of_one

PEAKS = ("forward_peak", "backward_peak", "optimizer_peak")


def hooked(device: str = "cpu") -> None:
    """Gradients that are sent in half precision."""
    start(device)
    model = DistributedDataParallel(Decoder().to(device))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, torch.optim.SGD(model.parameters(), momentum=0.9), device=device)


def redundancy_free(device: str = "cpu") -> None:
    """Optimizer states that the processes share out among them."""
    start(device)
    model = DistributedDataParallel(Decoder().to(device))
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    train(model, optimizer, device=device)


class Alone(dist.ProcessGroup):
    """A group of one process that sends nothing and is done at once.

    gloo's threads hold a tensor until they are through with it, so that a peak would depend on
    when they run. The ``fake`` group gives no result, which the reducer asks for.
    """

    def allreduce(self, tensors: Any, *_: Any) -> dist.Work:
        return self._done(tensors)

    def broadcast(self, tensors: Any, *_: Any) -> dist.Work:
        return self._done(tensors)

    def allgather(self, gathered: Any, tensors: Any, *_: Any) -> dist.Work:
        for one, tensor in zip(gathered, tensors, strict=True):
            one[0].copy_(tensor)
        return self._done(gathered)

    def _done(self, result: Any) -> dist.Work:
        future: Any = torch.futures.Future()
        future.set_result(result)
        return _create_work_from_future(future)

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return "alone"


dist.Backend.register_backend("alone", lambda _, rank, size, __: Alone(rank, size), devices=["cpu"])


@pytest.mark.parametrize("name", ["ddp", "ddp_views", "ddp_accumulated"])
def test_peaks_are_those_of_a_real_process(name: str) -> None:
    traced = trace(PROGRAMS[name], host="here", world_size=1)
    with group_of_one("alone"):
        real = measure(PROGRAMS[name])
    assert [getattr(traced, peak) for peak in PEAKS] == [getattr(real, peak) for peak in PEAKS]
    assert not traced.warnings


@pytest.mark.parametrize("views", [False, True])
def test_buckets_take_the_gradients_once_more_unless_these_are_views(views: bool) -> None:
    def program() -> None:
        start("cuda")
        model = DistributedDataParallel(Decoder().cuda(), gradient_as_bucket_view=views)
        train(model, torch.optim.SGD(model.parameters()), device="cuda")

    profile = trace(program, device="cuda", world_size=4)
    gradients = sum(one.numel() * one.element_size() for one in Decoder().parameters())
    kinds = profile.by_kind("optimizer")
    assert kinds["communication buffer"] == gradients
    assert kinds.get("gradient", 0) == (0 if views else gradients)
    assert kinds["parameter"] == gradients


def test_hooks_and_optimizers_on_top() -> None:
    plain, half = (trace(one, world_size=8) for one in (PROGRAMS["ddp"], hooked))
    assert half.peak > 0
    shared = trace(redundancy_free, world_size=8)
    states = 2 * sum(one.numel() * one.element_size() for one in Decoder().parameters())
    assert plain.optimizer_peak - shared.optimizer_peak > states / 2


def test_buckets_are_on_the_gpu_whatever_ran_before_they_are_made_anew() -> None:
    seen: list[torch.device] = []

    def halved(_: object, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
        seen.append(bucket.buffer().device)
        torch.zeros(1)  # on the host
        return default_hooks.fp16_compress_hook(dist.group.WORLD, bucket)

    def program() -> None:
        start("cuda")
        model = DistributedDataParallel(nn.Linear(8, 8).cuda())
        model.register_comm_hook(None, halved)
        for _ in range(3):
            model(torch.randn(2, 8, device="cuda")).sum().backward()

    trace(program, device="cuda", world_size=4)
    assert seen == [torch.device("cuda", 0)] * 3


@pytest.mark.parametrize(
    ("per", "steps", "channels", "padding"), [("tensor", 1, 1, 0), ("channel", 2, 61, 512)]
)
def test_quantization_hooks_go_on_with_what_nccl_gathered_into(per, steps, channels, padding):
    def program() -> None:
        start("cuda")
        model = DistributedDataParallel(nn.Linear(60, 512, bias=False, device="cuda"))
        hook = getattr(quantization_hooks, f"quantization_per{per}_hook")
        model.register_comm_hook(dist.group.WORLD, hook)
        for _ in range(steps):
            model(torch.randn(2, 60, device="cuda")).sum().backward()

    four, eight = (trace(program, device="cuda", world_size=size).peak for size in (4, 8))
    # Of four more processes: quantized gradients, which are gathered into one tensor and live on in
    # that alone, and a scale and a zero point of each channel, there and in the list of outputs.
    assert eight - four == 4 * (60 * 512 + padding + 2 * 2 * 4 * channels)


def test_what_is_gathered_into_is_there_for_as_long_as_its_work() -> None:
    held: list[object] = []

    def program(sizes: list[int], asynchronous: bool) -> None:
        start("cuda")
        own = torch.ones(sizes[0], device="cuda")
        others = [torch.empty(size, device="cuda") for size in sizes]
        held[:] = [dist.all_gather(others, own, async_op=asynchronous)]
        torch.empty(1 << 20, device="cuda")
        held.clear()

    def peak(sizes: list[int], asynchronous: bool) -> int:
        return trace(program, sizes, asynchronous, device="cuda", world_size=2).peak

    even = peak([1 << 18] * 2, False)
    assert peak([1 << 18] * 2, True) - even == 2 << 20
    # Uneven parts are not gathered into one.
    assert even - peak([1 << 18, 256], True) == (1 << 20) - 1024


def _asynchronous(name: str) -> None:
    start()
    own, other = torch.ones(1 << 18), torch.empty(1 << 18)
    into = [other] if name == "all_gather" else other
    work = getattr(dist, name)(into, own, async_op=True)
    work.wait()
    del own, other, into
    torch.empty(1 << 20)


def _functional(name: str, *others: Any) -> None:
    start()
    group, operators = dist.group.WORLD.group_name, torch.ops._c10d_functional
    into = {"out": torch.empty(1 << 18)} if name.endswith("_out") else {}
    given = [torch.ones(1 << 18)] if name.endswith("_coalesced") else torch.ones(1 << 18)
    made = getattr(operators, name)(given, *others, group, **into)
    del given, into
    torch.empty(1 << 20)
    for one in [made] if isinstance(made, torch.Tensor) else made:
        operators.wait_tensor(one)


@pytest.mark.parametrize(
    ("program", "given"),
    [
        (_asynchronous, ("all_gather",)),
        (_asynchronous, ("all_to_all_single",)),
        (_asynchronous, ("reduce_scatter_tensor",)),
        (_functional, ("all_gather_into_tensor", 1)),
        (_functional, ("all_gather_into_tensor_coalesced", 1)),
        (_functional, ("all_gather_into_tensor_out", 1)),
        (_functional, ("all_reduce", "sum")),
        (_functional, ("all_to_all_single", [1 << 18], [1 << 18])),
        (_functional, ("reduce_scatter_tensor", "sum", 1)),
    ],
)
def test_work_holds_what_that_of_gloo_does(program: Any, given: tuple[Any, ...]) -> None:
    traced = trace(program, *given, host="here", world_size=1)
    with group_of_one():
        real = measure(program, *given)
    assert traced.peak == without_gloo(real).peak


def test_work_of_nccl_holds_what_it_is_given_until_it_is_waited_for() -> None:
    def program(waited: bool) -> None:
        start("cuda")
        other = torch.empty(1 << 20, device="cuda")
        work = dist.all_gather_single(other, torch.ones(1 << 19, device="cuda"), async_op=True)
        if waited:
            work.wait()
        torch.empty(1 << 20, device="cuda")
        del work

    early, late = (trace(program, one, device="cuda", world_size=2).peak for one in (True, False))
    assert late - early == 2 << 20


def test_what_nobody_waits_for_stays() -> None:
    def program(way: str) -> None:
        start("cuda")
        given = torch.ones(512, device="cuda")
        made = functional.reduce_scatter_tensor(given, "sum", 0, dist.group.WORLD)
        if way == "compiled":  # the compiler waits for it
            torch.compile(torch.neg, backend="aot_eager")(made)
        elif way == "waited":
            made.neg()

    for way, end in (("waited", 0), ("compiled", 0), ("dropped", 2048 + 1024)):
        assert trace(program, way, device="cuda", world_size=2).end == end


def test_batch_norm_takes_the_statistics_of_every_process() -> None:
    def program(batch: int) -> None:
        start("cuda")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(8)).cuda()
        model(torch.randn(batch, 8, 64, 64, device="cuda")).sum().backward()

    small, large = (trace(program, size, device="cuda", world_size=4) for size in (2, 64))
    for one in (small, large):
        sizes = [x.nbytes for x in one.timeline.allocations if "index" in x.origin.operator]
        assert [size for size in sizes if size in (16, 128)] == [16, 128, 128]  # of 4 processes
    assert not small.unknown_workspaces


def test_a_wrapped_module_from_outside_is_refused() -> None:
    with group_of_one():
        model = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)))
        with pytest.raises(Exception, match=r"Sequential\.0 \(DistributedDataParallel\)"):
            trace(model, torch.randn(2, 4))


def test_sparse_gradients_are_reduced_by_gloo_and_refused_by_nccl() -> None:
    def step(device: str) -> None:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
        model = DistributedDataParallel(nn.Embedding(60, 8, sparse=True).to(device))
        model(torch.arange(32, device=device)).sum().backward()
        assert model.module.weight.grad.is_sparse

    gradient = trace(step, "cpu", world_size=2).by_kind("backward")["gradient"]
    assert gradient == 32 * (8 * 4 + 8)  # values, and their rows
    with pytest.raises(RuntimeError, match="NCCL does not support all_reduce with sparse tensors"):
        trace(step, "cuda", device="cuda", world_size=2)
