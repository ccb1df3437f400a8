"""What cuDNN takes for recurrent layers: published sizes, and what follows for a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.operators.calls import RecurrentSettings
from pytest_torchmem.operators.recurrent.cudnn import GRU, LSTM, reserve, temporary_space

MIB = 1024**2


def settings(mode: int, hidden: int, layers: int, **options: object) -> RecurrentSettings:
    """Return those of a layer in one direction, in training."""
    plain = RecurrentSettings(mode, hidden, 0, layers, False, 0.0, True, False, (), None)
    return plain._replace(**options)


def space(kind: type[nn.RNNBase], mode: int, shape: tuple[int, ...], hidden: int, layers: int):  # type: ignore[no-untyped-def]
    """Return workspace and reserve of a layer."""
    with torch.device("meta"):
        layer, input = kind(shape[-1], hidden, layers), torch.empty(shape)
    chosen = settings(mode, hidden, layers)
    return temporary_space(input, layer._flat_weights, chosen), reserve(input, chosen)


@pytest.mark.parametrize(
    ("kind", "mode", "published"),
    [(nn.GRU, GRU, (13_169_920, 864_000_000)), (nn.LSTM, LSTM, (17_730_560, 736_000_000))],
)
def test_sizes_that_were_published(
    kind: type[nn.RNNBase], mode: int, published: tuple[int, int]
) -> None:
    """pytorch#2895, cuDNN 6 or 7, without the 8 MiB for cuBLAS: four layers of 320, by the numbers
    of parameters; 100 sequences of 250 steps, by two of these sizes, so that two are the check.
    """
    found = space(kind, mode, (250, 100, 123), 320, 4)
    assert (found[0] - 8 * MIB, found[1]) == published


def test_the_smallest_layer_of_jax() -> None:
    """Its tests/rnn_test.py, ``test_struct_encoding_determinism``."""
    assert space(nn.LSTM, LSTM, (1, 1, 1), 1, 1) == (8_389_440, 320)


def test_a_packed_sequence_counts_as_if_it_were_padded() -> None:
    rows = torch.empty(7, 8, device="meta")
    packed = settings(LSTM, 16, 2, batch_sizes=(3, 2, 1, 1))
    padded = settings(LSTM, 16, 2)
    assert reserve(rows, packed) == reserve(torch.empty(4, 3, 8, device="meta"), padded)


def test_a_recurrent_layer_has_a_bound() -> None:
    layer, x = nn.GRU(32, 16, bidirectional=True), torch.ones(64, 8, 32)
    profile = trace(layer, x, device="cuda", gpu="a100", loss_fn=lambda out: out[0].sum())
    assert not profile.unknown_workspaces
    assert profile.by_confidence()["bounded"] > 8 * MIB
    assert trace(layer.eval(), x, device="cuda", backward=False).peak > profile.peak / 2
