"""Recurrent layers on a GPU that cuDNN does not take."""

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.operators.calls import LayerSettings
from pytest_torchmem.operators.recurrent.layers import (
    Hidden,
    Weights,
    gru_cell,
    lstm_cell,
    run_layers,
    simple_cell,
)


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
    kind: Any,
    cell: Any,
    options: dict[str, Any],
    bidirectional: bool,
    bias: bool,
    packed: bool,
    chance: Random,
) -> None:
    """With cells that run on the CPU, the way through steps, rows and directions is the same."""
    torch.manual_seed(chance.getrandbits(32))
    layer = kind(
        5, 4, num_layers=2, bias=bias, bidirectional=bidirectional, batch_first=True, **options
    )
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
        expected = expected.data
        found = run_layers(
            cell, sequence.data, *arguments, batch_sizes=sequence.batch_sizes.tolist()
        )
    else:
        expected, final = layer(x, given)
        found = run_layers(cell, x, *arguments, batch_first=True)
    torch.testing.assert_close(found[0], expected)
    for one, other in zip(found[1:], final if isinstance(final, tuple) else (final,), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("kind", "kernel", "cell"),
    [
        (nn.LSTM, "aten::_thnn_fused_lstm_cell", lstm_cell),
        (nn.GRU, "aten::_thnn_fused_gru_cell", gru_cell),
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
