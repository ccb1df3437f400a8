"""What cuDNN keeps for the dropout between recurrent layers."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_torchmem import MemoryProfile, read_calibration, trace, write_calibration
from pytest_torchmem.measurement.calibrate import _reserve_of
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.operators.workspace_of import key_of
from pytest_torchmem.profile.timeline import Allocation, Confidence
from pytest_torchmem.targets.gpus import Calibration, Setup, WorkspaceKey, WorkspaceSize
from pytest_torchmem.torch_private.names import TORCH_SERIES

MAKER = torch.ops.aten._cudnn_init_dropout_state.default


def dropout_states(profile: MemoryProfile) -> list[Allocation]:
    live = profile.timeline.live_at(len(profile.timeline.events))
    return [found for found in live if found.label == "cuDNN dropout"]


@pytest.mark.parametrize(("dropout", "training"), [(0.5, True), (0.0, True), (0.5, False)])
def test_the_state_of_dropout_stays_once_for_a_process(dropout: float, training: bool) -> None:
    """cudnn/RNN.cpp, ``get_dropout_state``: made by the first layer that trains with dropout."""
    layers = nn.ModuleList([nn.LSTM(8, 8, 2, dropout=dropout), nn.GRU(8, 8, 2, dropout=dropout)])
    layers.train(training)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = self.layers[0](x)[0]
            return torch.utils.checkpoint.checkpoint(self.layers[1], x, use_reentrant=False)[0]

    profile = trace(Both(), torch.ones(3, 2, 8), device="cuda", gpu="a100", backward=training)
    states = dropout_states(profile)
    name = "aten::_cudnn_init_dropout_state"
    if dropout and training:
        (state,) = states
        assert state.nbytes == 108 * 2048 * 24
        assert state.confidence is Confidence.UNKNOWN
        assert state.origin.operator == name
        assert name in profile.unknown_workspaces
    else:
        assert not states
        assert name not in profile.unknown_workspaces


def test_its_size_was_recorded_on_an_h100() -> None:
    profile = trace(nn.GRU(8, 8, 2, dropout=0.5), torch.ones(3, 2, 8), device="cuda", gpu="h100")
    (state,) = dropout_states(profile)
    assert (state.nbytes, state.confidence) == (6_488_064, Confidence.LIBRARY)
    assert not profile.unknown_workspaces


def test_its_size_can_be_measured(tmp_path: Path) -> None:
    """A calibration is asked for it as for an output whose size cuDNN alone knows."""
    model, x = nn.LSTM(8, 8, 2, dropout=0.5), torch.ones(3, 2, 8)
    asked = trace(model, x, device="cuda", gpu="a100").questions
    question = key_of(spec_of(MAKER), (0.5, True, 1234), {"dtype": torch.uint8})
    assert question == WorkspaceKey("aten::_cudnn_init_dropout_state", "")
    assert question in asked
    figures = {found: WorkspaceSize(0, 2_500_000) for found in asked}
    file = tmp_path / "calibration.json"
    write_calibration(file, Calibration({Setup("a100-80gb", TORCH_SERIES, "9.19.0"): figures}))
    measured = trace(model, x, device="cuda", gpu="a100", calibration=read_calibration(file))
    (state,) = dropout_states(measured)
    assert (state.nbytes, state.confidence) == (2_500_000, Confidence.CALIBRATED)
    assert (measured.unknown_workspaces, measured.questions) == ((), asked)
    made = torch.empty(2_500_000, dtype=torch.uint8)
    assert _reserve_of(spec_of(MAKER), made) == 2_500_000
