"""What cuDNN takes for recurrent layers: recorded and published sizes, and how sure they are."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.operators.calls import RecurrentSettings
from pytest_torchmem.operators.recurrent import cudnn
from pytest_torchmem.operators.recurrent.cudnn import (
    GRU,
    LSTM,
    RELU,
    TANH,
    Algorithm,
    algorithm,
    reserve,
    temporary_space,
)
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.targets.gpus import find_gpu

MIB = 1024**2
H100 = find_gpu("h100")
MODES = {"RELU": RELU, "TANH": TANH, "LSTM": LSTM, "GRU": GRU}

#: An H100 (driver 580.159.04), torch 2.11.0+cu130, cuDNN 9.19.0, 25 November 2026: cell, layers,
#: directions, hidden, projected and input size, steps, batch, rows of a packed sequence, type,
#: dropout; workspace of the forward, of both gradients, and reserve. "-" where it was not training.
PADDED = Path(__file__).parents[2] / "benchmarks" / "truth" / "recorded" / "h100" / "recurrent.txt"
OTHERS = """
RELU 1 1 896 0 896 10 16 - float16 0 18166144 18166144 286976
LSTM 1 1 512 0 256 3 40 - float16 0.3 15663680 15663680 614656
TANH 2 2 32 0 32 25 2 41 bfloat16 0 33597696 33597696 16000
TANH 4 1 1500 0 7 100 64 3180 float16 0 79991712 79991712 66780256
GRU 1 1 150 0 64 7 16 75 float16 0 8663392 8663392 135264
LSTM 2 1 200 0 28 8 8 30 float64 0 21142272 21142272 528256
"""


def sizes(row: str) -> tuple[list[int], list[int]]:
    """Return computed and recorded bytes: the forward's, the gradients' and the reserve."""
    cell, *numbers = row.split()
    layers, directions, hidden, projected, width, steps, batch = map(int, numbers[:7])
    rows, dtype, dropout, *recorded = numbers[7:]
    known = [int(one) for one in recorded if one != "-"]
    packed = () if rows == "-" else (batch,) * steps
    settings = RecurrentSettings(
        MODES[cell],
        hidden,
        projected,
        layers,
        batch_first=False,
        dropout=float(dropout),
        train=len(known) > 1,
        bidirectional=directions == 2,
        batch_sizes=packed,
        dropout_state=None,
    )
    kind = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(cell, nn.RNN)
    more = {"proj_size": projected} if projected else {}
    with torch.device("meta"):
        layer = kind(width, hidden, layers, bidirectional=directions == 2, **more)
        shape = (int(rows), width) if packed else (steps, batch, width)
        input = torch.empty(shape, dtype=getattr(torch, dtype))
    given = H100, input, layer._flat_weights, settings
    computed = [temporary_space(*given), temporary_space(*given, backward=True)]
    return [*computed, reserve(input, settings)][: len(known)], known


def test_sizes_that_were_recorded_by_old_and_new_versions() -> None:
    rows = [*PADDED.read_text(encoding="utf-8").splitlines(), *OTHERS.split("\n")[1:-1]]
    assert len(rows) > 2300
    for row in rows:
        computed, recorded = sizes(row)
        assert computed == recorded, row
    # pytorch#2895, cuDNN 6 or 7: four layers of 320, by the numbers of parameters; 100 sequences of
    # 250 steps, by the reserves. Their workspaces were smaller.
    for cell, published in (("GRU", 864_000_000), ("LSTM", 736_000_000)):
        computed, _ = sizes(f"{cell} 4 1 320 0 123 250 100 - float32 0 0 0 0")
        assert computed[2] == published + 256


def test_the_smallest_layer_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tests/rnn_test.py, ``test_struct_encoding_determinism``: the standard algorithm."""
    monkeypatch.setattr(cudnn, "algorithm", lambda *given: Algorithm.STANDARD)
    computed, published = sizes("LSTM 1 1 1 0 1 1 1 - float32 0 8389440 8389440 320")
    assert computed == published


@pytest.mark.parametrize(
    ("gpu", "cell", "width", "hidden", "steps", "batch", "expected"),
    [
        ("h100", LSTM, 128, 512, 1, 128, Algorithm.PERSISTENT),
        ("h100", LSTM, 128, 512, 1, 136, Algorithm.STANDARD),
        ("h100", LSTM, 100, 512, 1, 128, Algorithm.STANDARD),
        ("h100", GRU, 128, 512, 1, 128, Algorithm.STANDARD),
        ("h100", TANH, 128, 1024, 1, 96, Algorithm.STANDARD),
        ("h100", TANH, 128, 384, 1, 96, Algorithm.SMALL),
        ("rtx-4090", LSTM, 128, 512, 1, 128, Algorithm.PERSISTENT),
        ("a40", LSTM, 128, 512, 1, 128, Algorithm.STANDARD),
        ("v100", GRU, 128, 512, 10, 32, Algorithm.PERSISTENT),
        ("v100", GRU, 128, 512, 10, 48, Algorithm.STANDARD),
        ("t4", LSTM, 128, 512, 10, 32, Algorithm.STANDARD),
    ],
)
def test_the_algorithm_of_half_precision(gpu, cell, width, hidden, steps, batch, expected):
    """native/cudnn/RNN.cpp, ``get_algo``."""
    settings = RecurrentSettings(cell, hidden, 0, 1, False, 0.0, True, False, (), None)
    input = torch.empty(steps, batch, width, dtype=torch.float16, device="meta")
    assert algorithm(find_gpu(gpu), input, settings, backward=False) is expected


def test_sizes_are_estimates_on_gpus_that_were_not_asked() -> None:
    layer, x = nn.GRU(32, 16, bidirectional=True), torch.ones(64, 8, 32)
    known, guessed = (
        trace(layer, x, device="cuda", gpu=gpu, loss_fn=lambda out: out[0].sum())
        for gpu in ("h100", "a100")
    )
    names = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
    assert not known.unknown_workspaces
    assert known.by_confidence()[Confidence.LIBRARY.value] > 8 * MIB
    assert guessed.unknown_workspaces == names
    assert "an estimate: cuDNN was asked for its size on an H100 alone" in guessed.warnings[0]
    assert guessed.by_confidence()[Confidence.UNKNOWN.value] > 8 * MIB
