"""Recurrent layers: what cuDNN takes for them and keeps, and those that it does not take."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import MemoryProfile, read_calibration, trace, write_calibration
from pytest_torchmem.measurement.calibrate import _reserve_of
from pytest_torchmem.operators.calls import LayerSettings, RecurrentSettings
from pytest_torchmem.operators.recurrent import cudnn
from pytest_torchmem.operators.recurrent import layers as cells
from pytest_torchmem.operators.recurrent.cudnn import GRU, LSTM, RELU, TANH, Algorithm
from pytest_torchmem.operators.recurrent.layers import Hidden, Weights, run_layers, simple_cell
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.operators.workspace_of import key_of
from pytest_torchmem.profile.timeline import Allocation, Confidence
from pytest_torchmem.targets.gpus import Calibration, Setup, WorkspaceKey, WorkspaceSize, find_gpu
from pytest_torchmem.torch_private.names import TORCH_SERIES
from tests.modules import Parts

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
    shape, train = (MODES[cell], hidden, projected, layers, False), len(known) > 1
    settings = RecurrentSettings(*shape, float(dropout), train, directions == 2, packed, None)
    kind = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(cell, nn.RNN)
    more = {"proj_size": projected} if projected else {}
    with torch.device("meta"):
        layer = kind(width, hidden, layers, bidirectional=directions == 2, **more)
        shape = (int(rows), width) if packed else (steps, batch, width)
        input = torch.empty(shape, dtype=getattr(torch, dtype))
    given = H100, input, layer._flat_weights, settings
    computed = [cudnn.temporary_space(*given), cudnn.temporary_space(*given, backward=True)]
    return [*computed, cudnn.reserve(input, settings)][: len(known)], known


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
    assert cudnn.algorithm(find_gpu(gpu), input, settings, backward=False) is expected


def test_sizes_are_estimates_on_gpus_that_were_not_asked() -> None:
    layer, x = nn.GRU(32, 16, bidirectional=True), torch.ones(64, 8, 32)
    options: Any = {"device": "cuda", "loss_fn": lambda out: out[0].sum()}
    known, guessed = (trace(layer, x, gpu=gpu, **options) for gpu in ("h100", "a100"))
    names = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
    assert not known.unknown_workspaces
    assert known.by_confidence()[Confidence.LIBRARY.value] > 8 * MIB
    assert guessed.unknown_workspaces == names
    assert "an estimate: cuDNN was asked for its size on an H100 alone" in guessed.warnings[0]
    assert guessed.by_confidence()[Confidence.UNKNOWN.value] > 8 * MIB


MAKER = torch.ops.aten._cudnn_init_dropout_state.default


def dropout_states(profile: MemoryProfile) -> list[Allocation]:
    live = profile.timeline.live_at(len(profile.timeline.events))
    return [found for found in live if found.label == "cuDNN dropout"]


@pytest.mark.parametrize(("dropout", "training"), [(0.5, True), (0.0, True), (0.5, False)])
def test_the_state_of_dropout_stays_once_for_a_process(dropout: float, training: bool) -> None:
    """cudnn/RNN.cpp, ``get_dropout_state``: made by the first layer that trains with dropout."""
    layers = nn.ModuleList([nn.LSTM(8, 8, 2, dropout=dropout), nn.GRU(8, 8, 2, dropout=dropout)])
    layers.train(training)

    class Both(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = self.layers[0](x)[0]
            return torch.utils.checkpoint.checkpoint(self.layers[1], x, use_reentrant=False)[0]

    model, x = Both(layers=layers), torch.ones(3, 2, 8)
    profile = trace(model, x, device="cuda", gpu="a100", backward=training)
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


def _lstm(input: Tensor, hidden: Hidden, weights: Weights) -> Hidden:
    cell = torch.nn.functional.linear(input, weights.w_ih, weights.b_ih)
    gates = cell + torch.nn.functional.linear(hidden[0], weights.w_hh, weights.b_hh)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * hidden[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if weights.w_hr is None else h @ weights.w_hr.t()), c


def _gru(input: Tensor, hidden: Hidden, weights: Weights) -> Hidden:
    biases = (weights.b_ih, weights.b_hh)
    b_ih, b_hh = (None, None) if biases[0] is None else biases
    return (torch.gru_cell(input, hidden[0], weights.w_ih, weights.w_hh, b_ih, b_hh),)


LAYERS: list[tuple[type[nn.RNNBase], Any, dict[str, Any]]] = [
    (nn.LSTM, _lstm, {}),
    (nn.LSTM, _lstm, {"proj_size": 3}),
    (nn.GRU, _gru, {}),
    (nn.RNN, simple_cell(torch.tanh), {}),
    (nn.RNN, simple_cell(torch.relu), {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize(("kind", "cell", "options"), LAYERS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_layers_of_cells_compute_what_torch_does(
    kind, cell, options, bidirectional, bias, packed, chance
):
    """With cells that run on the CPU, the way through steps, rows and directions is the same."""
    torch.manual_seed(chance.getrandbits(32))
    options = {"bidirectional": bidirectional, "bias": bias, "batch_first": True, **options}
    layer = kind(5, 4, num_layers=2, **options)
    x = torch.randn(3, 6, 5)
    count = 4 if bidirectional else 2
    states = [torch.randn(count, 3, options.get("proj_size", 4))]
    if kind is nn.LSTM:
        states.append(torch.randn(count, 3, 4))
    given: Any = tuple(states) if kind is nn.LSTM else states[0]
    arguments = (states, LayerSettings(layer._flat_weights, bias, 2, 0.0, True, bidirectional))
    if packed:
        sequence = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 1]), True)
        expected, final = layer(sequence, given)
        expected, sizes = expected.data, sequence.batch_sizes.tolist()
        found = run_layers(cell, sequence.data, *arguments, batch_sizes=sizes)
    else:
        expected, final = layer(x, given)
        found = run_layers(cell, x, *arguments, batch_first=True)
    torch.testing.assert_close(found[0], expected)
    for one, other in zip(found[1:], final if isinstance(final, tuple) else (final,), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("kind", "kernel", "cell"),
    [
        (nn.LSTM, "aten::_thnn_fused_lstm_cell", cells.lstm_cell),
        (nn.GRU, "aten::_thnn_fused_gru_cell", cells.gru_cell),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_cells_are_fused(kind: Any, kernel: str, cell: Any, packed: bool) -> None:
    def body() -> None:
        layer = kind(8, 4, 2, dropout=0.5).cuda()
        x: Any = torch.ones(5, 2, 8, device="cuda", requires_grad=True)
        if packed:
            x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
        output = layer(x)[0]
        (output.data if packed else output).sum().backward()

    def operators(**options: Any) -> Counter[str]:
        profile = trace(body, device="cuda", **options)
        return Counter(one.origin.operator for one in profile.timeline.allocations)

    with torch.backends.cudnn.flags(enabled=False):
        found = operators()
    outputs = 3 if kind is nn.LSTM else 2
    assert found[kernel] == outputs * 5 * 2
    assert "aten::_cudnn_rnn" not in found
    assert found["aten::native_dropout"] == 2  # output and mask, between the layers
    assert "aten::_cudnn_rnn" in operators()


def test_bfloat16_of_a_gpu_without_it() -> None:
    def body() -> None:
        layer = nn.LSTM(8, 4).cuda().bfloat16()
        layer(torch.ones(5, 2, 8, device="cuda", dtype=torch.bfloat16))[0].sum().backward()

    for gpu, kernel in (("t4", "aten::_thnn_fused_lstm_cell"), ("a100", "aten::_cudnn_rnn")):
        profile = trace(body, device="cuda", gpu=gpu)
        assert kernel in {one.origin.operator for one in profile.timeline.allocations}
