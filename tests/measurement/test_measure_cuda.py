"""Steps on a GPU, a stand-in with an allocator of its own, and how workers share several."""

import gc
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pytest_torchmem as torchmem
from pytest_torchmem.errors import DeviceMemoryError, UsageError
from pytest_torchmem.measurement import device as devices
from pytest_torchmem.measurement.device import Device, known_gpu, name_of
from pytest_torchmem.measurement.measured import MeasuredProfile
from pytest_torchmem.profile.timeline import Kind, Phase
from pytest_torchmem.targets.gpus import Gpu, find_gpu
from tests.measurement.stand_in import StandIn
from tests.modules import Parts
from tests.processes import waits_for

FLOAT = 4
VECTOR = 100_000 * FLOAT


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(devices, "cuda_device", lambda: found)
    return found


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight) * self.weight


def measured(*args: object, **options: object) -> MeasuredProfile:
    profile = torchmem.measure(*args, device="cuda", **options)
    assert isinstance(profile, MeasuredProfile)
    return profile


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_figures_are_those_of_the_cpu_allocator(gpu, optimizer, steps):
    def weighted(output: torch.Tensor) -> torch.Tensor:
        return (output * 0.5).sum()

    options = {"loss_fn": weighted, "optimizer": optimizer, "steps": steps}
    on_gpu = measured(Products(), torch.randn(100_000), **options)
    on_cpu = torchmem.measure(Products(), torch.randn(100_000), **options)
    cpu, cuda = on_cpu.figures(), on_gpu.figures()
    assert cuda.pop("reserved_peak") % (2 * 1024**2) == 0
    assert cuda.pop("allocated_peak") % 512 == 0
    # The sum on the CPU takes a row of partial sums per thread, which no operator returns.
    assert cuda.keys() == cpu.keys()
    assert all(abs(cuda[name] - cpu[name]) <= 64 * FLOAT for name in cpu)
    assert cuda["baseline"] == 2 * VECTOR
    assert (on_gpu.gpu, on_gpu.warnings) == ("a100-80gb", ())


def test_blocks_and_segments_have_peaks_of_their_own(gpu: StandIn) -> None:
    class Many(Parts):
        def forward(self) -> list[torch.Tensor]:
            return [weight * 2.0 for weight in self.weights]

    weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(10)])
    profile = measured(Many(weights=weights))
    assert profile.baseline == 10 * FLOAT
    assert profile.allocated["forward_peak"] >= 11 * 512
    assert profile.allocated["peak"] == profile.allocated_peak
    assert profile.allocated["peak"] % 512 == 0
    assert profile.reserved["peak"] == profile.reserved_peak == 2 * 1024**2
    assert profile.allocated.keys() == {"forward_peak", "backward_peak", "peak"}


def test_the_timeline_tells_what_was_alive(gpu: StandIn) -> None:
    profile = measured(Products(), torch.randn(100_000), optimizer=torch.optim.Adam)
    peaks = {phase: peak for phase, (peak, _) in profile.timeline.peaks().items()}
    assert peaks[Phase.FORWARD] == profile.forward_peak
    assert peaks[Phase.BACKWARD] == profile.backward_peak
    assert peaks[Phase.OPTIMIZER] == profile.optimizer_peak
    by_kind = profile.by_kind("optimizer")
    assert by_kind[Kind.PARAMETER.value] == by_kind[Kind.INPUT.value] == VECTOR
    assert by_kind[Kind.GRADIENT.value] == VECTOR
    assert by_kind[Kind.OPTIMIZER_STATE.value] >= 2 * VECTOR


def test_what_was_alive_before_is_not_counted(gpu: StandIn) -> None:
    alone = measured(Products(), torch.randn(100_000))
    with gpu.current():
        held = torch.zeros(1 << 20)
    beside = measured(Products(), torch.randn(100_000))
    assert {**beside.figures(), "reserved_peak": 0} == {**alone.figures(), "reserved_peak": 0}
    assert "4.00 MiB were in use on the GPU before" in beside.warnings[0]
    del held
    assert measured(Products(), torch.randn(100_000)).warnings == ()


def test_model_inputs_optimizer_and_generators_stay_as_they_were(gpu: StandIn) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.randn(2, 4, requires_grad=True)
    before = [parameter.clone() for parameter in model.parameters()]
    state, python_state = torch.get_rng_state(), random.getstate()
    measured(model, x, optimizer=torch.optim.SGD)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None
    assert torch.equal(state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert "set_generator_state" in gpu.calls
    assert gpu.statistics()["requested_bytes.all.current"] == 0


def test_a_model_on_meta_is_made_on_the_gpu(gpu: StandIn) -> None:
    with torch.device("meta"):
        model, x = Products(), torch.empty(100_000)
    assert measured(model, x).figures() == measured(Products(), torch.randn(100_000)).figures()


def test_a_callable_runs_once_and_a_module_is_warmed_up(gpu: StandIn) -> None:
    runs: list[int] = []

    def program() -> None:
        runs.append(1)
        x = torch.ones(1000, requires_grad=True)
        (x * 2.0).sum().backward()

    profile = measured(program)
    assert runs == [1]
    assert (profile.baseline, profile.forward_peak) == (0, 2 * 1000 * FLOAT + FLOAT)

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(2)
            return super().forward(x)

    measured(Counting(2, 2), torch.ones(1, 2))
    assert runs == [1, 2, 2]


def test_a_backward_that_asks_for_nothing_has_what_is_alive(gpu: StandIn) -> None:
    def views() -> None:
        x = torch.ones(1000, requires_grad=True)
        torch.autograd.grad(x.view(10, 100), x, torch.ones(10, 100))

    def zeros_without_memory() -> None:
        torch.ones(1000, requires_grad=True).sgn().backward(torch.ones(1000))

    assert measured(views).backward_peak == 8000
    assert torchmem.trace(views).backward_peak == torchmem.measure(views).backward_peak == 8000
    zeros = torchmem.trace(zeros_without_memory)
    assert zeros.figures() == torchmem.measure(zeros_without_memory).figures()


def test_a_gpu_that_is_too_small_says_so_and_is_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    small = StandIn(Gpu("small", "Small GPU", (8, 0), 4 * 1024**2, 10, 1024))
    small.others = 1024**2
    monkeypatch.setattr(devices, "cuda_device", lambda: small)
    model = Products()
    with pytest.raises(DeviceMemoryError) as caught:
        measured(model, torch.randn(100_000), steps=1, optimizer=torch.optim.Adam)
    message = str(caught.value)
    assert "Small GPU has (4.00 MiB, of which 1.00 MiB are other processes')" in message
    assert "CUDA out of memory" in message
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    gc.collect()
    assert small.statistics()["requested_bytes.all.current"] == 0
    assert small.statistics()["reserved_bytes.all.current"] == 0
    assert model.weight.grad is None


def test_an_error_of_the_program_is_its_own_and_stops_the_history(gpu: StandIn) -> None:
    def program() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        measured(program)
    assert gpu._history is None


def test_without_a_gpu_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_device", lambda: StandIn(why_not="no GPU in this box"))
    with pytest.raises(UsageError, match="no GPU in this box, so nothing can be measured"):
        torchmem.measure(nn.Linear(2, 2), torch.ones(1, 2), device="cuda")
    if not torch.cuda.is_available():
        assert Device().why_not()


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4080", "rtx-4080"),
        ("Tesla P100-SXM2-16GB", "p100-sxm2-16gb"),
        ("NVIDIA", "gpu"),
    ],
)
def test_a_gpu_that_is_not_in_the_catalogue_has_a_name(product: str, name: str) -> None:
    assert name_of(product) == name


def test_a_gpu_is_known_by_what_changes_the_bytes() -> None:
    gib = 1024**3
    pcie = Gpu("a100-80gb-pcie", "NVIDIA A100 80GB PCIe", (8, 0), 79 * gib, 108, 2048)
    assert known_gpu(pcie) == find_gpu("a100-80gb")
    assert known_gpu(Gpu("x", "x", (8, 0), 39 * gib, 108, 2048)) == find_gpu("a100-40gb")
    assert known_gpu(Gpu("x", "x", (9, 0), 139 * gib, 132, 2048)) == find_gpu("h200")
    slice_of_it = Gpu("mig", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 40 * gib, 42, 2048)
    assert known_gpu(slice_of_it) == find_gpu("a100-80gb:3g.40gb")
    unknown = Gpu("mig", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 40 * gib, 44, 2048)
    assert known_gpu(unknown) is unknown


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The GPUs that were made current, of two."""
    found: list[int] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda index: found.append(index) or nullcontext())
    return found


@pytest.mark.parametrize(
    ("worker", "expected"), [("", []), ("gw0", [0]), ("gw1", [1]), ("gw12", [0]), ("master", [])]
)
def test_each_worker_has_a_gpu(worker, expected, chosen, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    with Device().taken():
        pass
    assert chosen == expected


def test_one_measures_at_a_time(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    waits_for(Device().taken(), Device().taken())
