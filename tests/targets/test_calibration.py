"""What was measured on a GPU takes the place of what cannot be computed."""

import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from pytest_torchmem import MemoryProfile, trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.operators.workspace_of import geometry_text, key_of
from pytest_torchmem.profile.timeline import Confidence, Kind
from pytest_torchmem.targets.gpus import Calibration, Setup, WorkspaceKey, WorkspaceSize
from pytest_torchmem.torch_private.names import TORCH_SERIES
from tests.results import cuda

A100 = Setup("a100-80gb", TORCH_SERIES, "9.19.0")
GEOMETRY = "float32[2,3,8,8], float32[4,3,3,3], None, [1,1], [0,0], [1,1], False, [0,0], 1"
CONVOLUTION = WorkspaceKey("aten::convolution", GEOMETRY)


def convolve() -> None:
    """Run a convolution, whose workspace only cuDNN knows, and a kernel without a workspace."""
    functional.conv2d(cuda(2, 3, 8, 8), cuda(4, 3, 3, 3))
    cuda(8, 8).softmax(-1)


def of_convolution(workspace: int, setup: Setup = A100) -> Calibration:
    """Return a calibration with the convolution's figure alone."""
    return Calibration({setup: {CONVOLUTION: WorkspaceSize(workspace)}})


def answering_all(target, figure, *args, **options) -> MemoryProfile:
    """Trace with ``figure`` for everything that is asked."""
    asked = trace(target, *args, device="cuda", gpu="a100", **options).questions
    calibration = Calibration({A100: dict.fromkeys(asked, figure)})
    return trace(target, *args, device="cuda", gpu="a100", calibration=calibration, **options)


def test_a_trace_says_what_no_formula_gives() -> None:
    first, second = (trace(convolve, device="cuda", gpu="a100") for _ in range(2))
    assert first.questions == second.questions == (CONVOLUTION,)  # also where plans are remembered
    assert first.unknown_workspaces == ("aten::convolution",)
    assert first.calibrated_workspaces == ()
    assert not trace(lambda: cuda(8, 8).softmax(-1), device="cuda", gpu="a100").questions
    assert not trace(nn.Conv2d(3, 4, 3), torch.ones(2, 3, 8, 8)).questions  # on the CPU
    assert pickle.loads(pickle.dumps(first)).questions == first.questions


def test_a_figure_replaces_what_is_unknown() -> None:
    profile = trace(convolve, device="cuda", gpu="a100", calibration=of_convolution(12_345))
    assert profile.by_confidence() == {"calibrated": 12_345}
    assert (profile.unknown_workspaces, profile.warnings) == ((), ())
    assert profile.calibrated_workspaces == ("aten::convolution",)
    assert profile.questions == (CONVOLUTION,)
    assert "workspace, measured" in profile.table()
    told = "kernel workspace at the peak:"
    assert profile.table().endswith(f"{told} 12.06 KiB measured")
    unknown = trace(convolve, device="cuda", gpu="a100").table()
    assert unknown.endswith(f"{told} unknown for aten::convolution")
    assert told not in trace(nn.ReLU(), torch.ones(2, requires_grad=True)).table()


def test_a_limit_is_replaced_too() -> None:
    def mode() -> None:
        cuda(5000, grad=False).mode()

    assert "workspace, at most" in trace(mode, device="cuda", gpu="a100").table()
    assert answering_all(mode, WorkspaceSize(999)).by_confidence() == {"calibrated": 999}


def test_figures_are_of_their_gpu_and_calibration() -> None:
    one, other = of_convolution(1000), of_convolution(2000)
    found = [
        trace(convolve, device="cuda", gpu="a100", calibration=calibration).by_confidence()
        for calibration in (one, other, None, one)
    ]
    assert found == [{"calibrated": 1000}, {"calibrated": 2000}, {}, {"calibrated": 1000}]
    profile = trace(convolve, device="cuda", gpu="h100", calibration=of_convolution(12_345))
    assert profile.unknown_workspaces == ("aten::convolution",)
    profile = trace(convolve, device="cuda", gpu="a100", calibration=of_convolution(0))
    assert not profile.unknown_workspaces
    assert profile.calibrated_workspaces == ("aten::convolution",)
    assert profile.by_confidence() == {}


def test_the_series_own_figures_come_first_and_then_the_latest() -> None:
    def found(*setups: Setup) -> int:
        figures = {setup: {CONVOLUTION: WorkspaceSize(n)} for n, setup in enumerate(setups, 1)}
        answer = Calibration(figures).find(CONVOLUTION, "a100-80gb", "2.13")
        assert answer[1] == setups[answer[0].workspace - 1]
        return answer[0].workspace

    def of(torch_series: str, cudnn: str = "9.10.2") -> Setup:
        return Setup("a100-80gb", torch_series, cudnn)

    assert found(of("2.14"), of("2.13"), of("2.12")) == 2
    assert found(of("2.9"), of("2.12")) == 2
    assert found(of("2.13", "9.9.0"), of("2.13", "9.10.2")) == 2


def test_no_calibration_is_taken_for_one() -> None:
    with pytest.raises(UsageError, match="read_calibration"):
        trace(convolve, device="cuda", calibration="__torchmem__")


def test_what_operators_inside_of_others_take() -> None:
    """A composite operator's plan has the questions and figures of those it is made of."""

    def body() -> None:
        torch.linalg.pinv(cuda(8, 8))

    unknown = trace(body, device="cuda", gpu="a100")
    assert {question.operator for question in unknown.questions} == {"aten::_linalg_svd"}
    measured = answering_all(body, WorkspaceSize(70_000_000))
    again = answering_all(body, WorkspaceSize(70_000_000))
    assert measured.questions == unknown.questions
    assert measured.figures() == again.figures()
    # It is given back before the first product takes cuBLAS's buffer of 8,519,680 bytes.
    held = 4 * (8 * 8 + 8 * 8 + 8 + 8 * 8) + 16  # the matrix, its factors, and 4 numbers
    assert measured.peak == 70_000_000 + held
    assert not measured.unknown_workspaces


def test_what_a_recurrent_layer_keeps_for_the_backward() -> None:
    model, x = nn.LSTM(8, 16), torch.ones(5, 2, 8)
    figure = WorkspaceSize(workspace=4096, reserve=1_000_000)
    unknown = trace(model, x, device="cuda", gpu="a100")
    measured = answering_all(model, figure, x)
    assert measured.figures() == answering_all(model, figure, x).figures()
    assert measured.calibrated_workspaces == ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
    assert not measured.unknown_workspaces
    # The backward is given the reserve, whose size follows from the other arguments.
    assert measured.questions == unknown.questions
    (reserve,) = (one for one in measured.live_at_peak("forward") if one.nbytes == 1_000_000)
    assert (reserve.kind, reserve.confidence) == (Kind.ACTIVATION, Confidence.CALIBRATED)
    assert reserve.shape == (1_000_000,)
    assert measured.by_confidence("forward")["calibrated"] == 1_000_000 + 4096
    estimate = max(
        one.nbytes for one in unknown.live_at_peak("forward") if one.kind is reserve.kind
    )
    assert measured.retained - unknown.retained == 1_000_000 - estimate > 0
    assert "activation, at least" in unknown.table(largest=100)
    assert "activation, told by cuDNN" in trace(model, x, device="cuda", gpu="h100").table(100)


def test_what_cudnns_batch_norm_keeps_for_the_backward() -> None:
    model, x = nn.BatchNorm2d(4), torch.ones(2, 4, 8, 8)
    unknown = trace(model, x, device="cuda", gpu="a100")
    measured = answering_all(model, WorkspaceSize(workspace=0, reserve=4096), x)
    assert measured.questions == unknown.questions
    assert measured.retained - unknown.retained == 4096
    assert measured.by_confidence("forward") == {"calibrated": 4096}


def test_geometry_as_text() -> None:
    tensor = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    text = geometry_text(
        (tensor, tensor.t(), None, [1, 2], True, torch.device("cpu")),
        {"dtype": torch.float32, "alpha": 1.5, "device": torch.device("cpu")},
    )
    assert text == "bfloat16[4,6], bfloat16[6,4]@1:6, None, [1,2], True, alpha=1.5, dtype=float32"


def test_settings_by_which_cudnn_chooses_are_part_of_a_question() -> None:
    flags = partial(torch.backends.cudnn.flags, enabled=True)

    def asked() -> str:
        (question,) = trace(convolve, device="cuda", gpu="a100").questions
        return question.geometry.removeprefix(GEOMETRY)

    assert asked() == ""
    with flags(benchmark=True, deterministic=True, allow_tf32=False):
        assert asked() == "; benchmark, deterministic, float32 as ieee"
    with flags(benchmark=True, allow_tf32=True):
        assert asked() == "; benchmark"
    assert asked() == ""


def test_a_reserve_is_no_part_of_a_question() -> None:
    operator = spec_of(torch.ops.aten.cudnn_batch_norm_backward.default)
    x, scale = torch.empty(2, 4, 8, 8), torch.empty(4)

    def asked(reserve: int) -> WorkspaceKey:
        saved = torch.empty(reserve, dtype=torch.uint8)
        return key_of(operator, (x, x, scale, None, None, scale, scale, 1e-5, saved), {})

    assert asked(0) == asked(4096)
    assert asked(0).geometry.endswith("float32[4], float32[4], 1e-05")
