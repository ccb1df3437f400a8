"""Calibration on a GPU, which a stand-in with an allocator of its own takes the place of."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

import pytest_torchmem as torchmem
from pytest_torchmem.errors import DeviceMemoryError, UsageError
from pytest_torchmem.measurement import device as devices
from pytest_torchmem.measurement.calibrate import record_figures
from pytest_torchmem.measurement.device import version_of_cudnn
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.step.step import Step
from pytest_torchmem.targets.gpus import Calibration, Gpu, Setup, WorkspaceKey, find_gpu, gpu_names
from pytest_torchmem.targets.gpus import WorkspaceSize as Size
from pytest_torchmem.torch_private.names import TORCH_SERIES
from tests.measurement.stand_in import StandIn
from tests.modules import Checkpointed, Parts

FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"
GEOMETRY = "float32[2,3,8,8], float32[4,3,3,3], float32[4], [1,1], [0,0], [1,1], False, [0,0], 1"
SETUP = Setup("a100-80gb", TORCH_SERIES, "9.19.0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(devices, "cuda_device", lambda: found)
    return found


def figures(calibration: Calibration) -> dict[str, Size]:
    """Return the figures of one setup by operator."""
    ((setup, found),) = calibration.figures.items()
    assert setup == SETUP
    assert len({question.operator for question in found}) == len(found)
    return {question.operator: figure for question, figure in found.items()}


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


def test_what_kernels_take_beyond_their_outputs(gpu: StandIn) -> None:
    gpu.workspaces = {FORWARD: 12_345, BACKWARD: lambda grad, x, *_: 10 * x.numel()}
    model, x = net(), torch.randn(2, 3, 8, 8)
    calibration = torchmem.calibrate(model, x, optimizer=torch.optim.AdamW)
    assert figures(calibration) == {FORWARD: Size(12_345), BACKWARD: Size(10 * x.numel())}
    assert WorkspaceKey(FORWARD, GEOMETRY) in calibration.figures[SETUP]


def test_a_trace_has_no_unknown_workspace_afterwards(gpu: StandIn) -> None:
    gpu.workspaces = {FORWARD: 2_000_000, BACKWARD: 3_000_000}
    model, x = net(), torch.randn(2, 3, 8, 8)
    calibration = torchmem.calibrate(model, x)
    before = torchmem.trace(model, x, device="cuda", gpu="a100")
    after = torchmem.trace(model, x, device="cuda", gpu="a100", calibration=calibration)
    assert before.unknown_workspaces == after.calibrated_workspaces == (FORWARD, BACKWARD)
    assert after.unknown_workspaces == after.warnings == ()
    assert after.by_confidence("forward") == {"calibrated": 2_000_000}
    assert after.by_confidence("backward")["calibrated"] == 3_000_000
    assert abs(torchmem.measure(model, x, device="cuda").peak - after.peak) <= 1024


def test_a_kernel_that_takes_nothing_has_a_figure(gpu: StandIn) -> None:
    found = figures(torchmem.calibrate(net(), torch.randn(2, 3, 8, 8)))
    assert found == {FORWARD: Size(0), BACKWARD: Size(0)}


@pytest.mark.parametrize("as_callable", [False, True])
def test_buffers_that_libraries_keep_are_no_workspace(gpu: StandIn, as_callable: bool) -> None:
    gpu.workspaces, gpu.buffers = {FORWARD: 100}, {FORWARD: 8_519_680, BACKWARD: 8_519_680}
    model, x = net(), torch.randn(2, 3, 8, 8)

    def body() -> None:
        device = "cpu" if torch.ones(1, device=gpu.torch_device).is_cpu else "cuda"
        convolution = nn.Conv2d(3, 4, 3, device=device)
        convolution(torch.ones(2, 3, 8, 8, device=device)).sum().backward()

    calibration = torchmem.calibrate(*((body,) if as_callable else (model, x)))
    if as_callable:
        assert not calibration.figures[SETUP]  # in the trace of such a body all is on the CPU
        (asked,) = torchmem.trace(net(), x, device="cuda", backward=False).questions
        step = Step()
        found = record_figures(gpu, find_gpu("a100"), (asked,), body, (), {}, step)
        assert found == {asked: Size(100)}
    else:
        assert figures(calibration) == {FORWARD: Size(100), BACKWARD: Size(0)}


def test_of_several_calls_the_largest_counts(gpu: StandIn) -> None:
    taken = iter([5, 700, 20] * 10)
    gpu.workspaces = {FORWARD: lambda *_: next(taken)}
    found = torchmem.calibrate(net(), torch.randn(2, 3, 8, 8), steps=3)
    assert figures(found)[FORWARD] == Size(700)


def test_a_recomputed_forward_answers_too(gpu: StandIn) -> None:
    gpu.workspaces = {FORWARD: 300, BACKWARD: 400}
    found = torchmem.calibrate(Checkpointed(inner=net()), torch.randn(2, 3, 8, 8))
    assert figures(found) == {FORWARD: Size(300), BACKWARD: Size(400)}


def test_operators_in_the_engines_own_threads_answer(gpu: StandIn) -> None:
    """A GPU has a thread of the engine's; on the CPU a deeply nested backward gets one.

    torch/csrc/autograd/engine.cpp, ``MAX_DEPTH``: from 60 on.
    """
    depth, threads = 62, set()

    def taken(*_: Any) -> int:
        threads.add(threading.get_ident())
        return 400

    class Nested(Parts):
        def forward(self, x: torch.Tensor, level: int = depth) -> Any:
            if level == 0:
                return self.inner(x)
            return checkpoint(self.forward, x, level - 1, use_reentrant=True)

    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    questions_of_one = torchmem.trace(net(), x, device="cuda").questions
    gpu.workspaces = {FORWARD: taken, BACKWARD: taken}
    step = Step()
    model = Nested(inner=net())
    found = record_figures(gpu, find_gpu("a100"), questions_of_one, model, (x,), {}, step)
    assert found == dict.fromkeys(questions_of_one, Size(400))
    assert len(threads) == 2


def test_operators_inside_of_composite_ones_answer(gpu: StandIn) -> None:
    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.pinv(x)

    gpu.workspaces = {"aten::_linalg_svd": 5000}
    found = torchmem.calibrate(Inverse(), torch.randn(8, 8), backward=False)
    assert figures(found) == {"aten::_linalg_svd": Size(5000)}


def test_operators_that_inference_mode_leaves_whole_answer(gpu: StandIn) -> None:
    class Inference(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                return self.inner(x)

    gpu.workspaces = {FORWARD: 600}
    found = torchmem.calibrate(Inference(inner=net()), torch.randn(2, 3, 8, 8), backward=False)
    assert figures(found) == {FORWARD: Size(600)}


def test_settings_of_cudnn_are_part_of_what_is_asked(gpu: StandIn) -> None:
    class Deterministic(Parts):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.backends.cudnn.flags(enabled=True, deterministic=True):
                return self.inner(x)

    found = torchmem.calibrate(Deterministic(inner=net()), torch.randn(2, 3, 8, 8), backward=False)
    (question,) = found.figures[SETUP]
    assert question == WorkspaceKey(FORWARD, f"{GEOMETRY}; deterministic")


@pytest.fixture
def recurrent() -> Iterator[Any]:
    """An operator with a reserve, whose size in a trace is a guess."""
    library = torch.library.Library("torchmem_test", "FRAGMENT")
    library.define("recurrent(Tensor x) -> (Tensor, Tensor)")

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty(0, dtype=torch.uint8, device=x.device)

    library.impl("recurrent", kernel, "CPU")
    library.impl("recurrent", kernel, "Meta")
    yield torch.ops.torchmem_test.recurrent.default
    library._destroy()


def test_outputs_whose_size_a_library_decides(gpu, recurrent, monkeypatch):
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return recurrent(x)

    name = recurrent.name()
    monkeypatch.setattr(spec_of(recurrent).record, "library_output", 1)
    gpu.workspaces, gpu.reserves = {name: 800}, {name: (1, 5_000_000)}
    x = torch.randn(16)
    calibration = torchmem.calibrate(Layer(), x, backward=False)
    assert figures(calibration) == {name: Size(800, 5_000_000)}
    options: Any = {"gpu": "a100", "backward": False, "calibration": calibration}
    traced = torchmem.trace(Layer(), x, device="cuda", **options)
    measured = torchmem.measure(Layer(), x, device="cuda", backward=False)
    assert traced.peak == measured.peak == 2 * 64 + 5_000_000 + 800


def test_everything_stays_as_it_was(gpu: StandIn) -> None:
    model, x = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Dropout()), torch.randn(2, 2, 4)
    before = [parameter.clone() for parameter in model.parameters()]
    state, python_state = torch.get_rng_state(), random.getstate()
    torchmem.calibrate(model, x, optimizer=torch.optim.SGD)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert gpu.statistics()["requested_bytes.all.current"] == 0
    assert torch.add(torch.ones(2), 1.0).sum() == 4  # nothing is intercepted any more


def test_without_a_question_nothing_runs(gpu: StandIn) -> None:
    assert len(torchmem.calibrate(nn.Linear(4, 4), torch.randn(2, 4))) == 0
    assert gpu.statistics()["requested_bytes.all.allocated"] == 0


def test_a_question_that_the_step_does_not_come_to_stays_open(gpu: StandIn) -> None:
    """The CPU, which stands in for the GPU here, has no batch norm of cuDNN's."""
    model, x = nn.Sequential(net(), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8)
    calibration = torchmem.calibrate(model, x)
    assert set(figures(calibration)) == {FORWARD, BACKWARD}
    profile = torchmem.trace(model, x, device="cuda", gpu="a100", calibration=calibration)
    others = {question.operator for question in profile.questions} - {FORWARD, BACKWARD}
    assert others == {"aten::cudnn_batch_norm", "aten::cudnn_batch_norm_backward"}


def test_a_gpu_that_the_catalogue_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Gpu("lab-gpu", "NVIDIA Lab", (8, 9), 16 * 1024**3, 77, 1536)
    monkeypatch.setattr(devices, "cuda_device", lambda: StandIn(other))
    calibration = torchmem.calibrate(net(), torch.randn(2, 3, 8, 8))
    assert [setup.gpu for setup in calibration.figures] == ["lab-gpu"]
    assert len(calibration) == 2
    assert "lab-gpu" not in gpu_names()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = StandIn(why_not="there is no CUDA device here")
    monkeypatch.setattr(devices, "cuda_device", lambda: absent)
    with pytest.raises(UsageError, match="cannot calibrate: there is no CUDA device"):
        torchmem.calibrate(net(), torch.randn(2, 3, 8, 8))
    assert absent.calls == ["why_not"]


def test_out_of_memory(gpu: StandIn) -> None:
    gpu.workspaces = {FORWARD: lambda *_: 1_000_000}
    gpu.others = gpu.gpu().memory - 3 * 1024**2
    with pytest.raises(DeviceMemoryError, match="needs more memory than"):
        torchmem.calibrate(net(), torch.randn(2, 3, 400, 400))
    assert gpu.statistics()["requested_bytes.all.current"] == 0
    assert functional.relu(torch.ones(1)) == 1


def test_an_allocator_that_does_not_count(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "statistics", dict)
    with pytest.raises(UsageError, match="does not count requests"):
        torchmem.calibrate(net(), torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("number", "version"), [(91900, "9.19.0"), (91002, "9.10.2"), (8902, "8.9.2"), (None, "")]
)
def test_the_version_of_cudnn(number: int | None, version: str) -> None:
    assert version_of_cudnn(number) == version
