"""What cuDNN takes for a recurrent layer: bounds of ``cudnnGetRNNTempSpaceSizes``.

cuDNN tells these sizes on a GPU alone. Its documentation says what they depend on: the network,
whether it is trained, the longest sequence and the batch, so a packed sequence counts as if it were
padded. The formulas give the published sizes to the byte (tests/operators/test_recurrent_space.py):
LSTM and GRU of cuDNN 6 or 7 (pytorch#2895, whose batch and steps follow from two of its four
sizes), an LSTM of cuDNN 9 (jax, tests/rnn_test.py,
``test_struct_encoding_determinism``). What these do not cover is assumed at its largest: other
cells, float32 states of a layer in half precision, projections, both directions, and a forward
without training, which can need no more than one with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_torchmem.operators.arguments import RecurrentSettings

RELU, TANH, LSTM, GRU = range(4)
"""``cudnnRNNMode_t``."""
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
#: What is kept for every step of a layer, in hidden sizes.
_KEPT = {RELU: 2, TANH: 2, LSTM: 5, GRU: 6}
_ALIGNED = 64
"""Bytes: each part begins at a multiple of this."""
_PRODUCTS = 8 * 1024**2
"""Bytes for cuBLAS, which cuDNN 6 and 7 did not take."""


def extent(input: Tensor, settings: RecurrentSettings) -> tuple[int, int]:
    """Return the longest sequence and the largest batch."""
    if settings.batch_sizes:
        return len(settings.batch_sizes), settings.batch_sizes[0]
    steps, batch = (input.transpose(0, 1) if settings.transposes else input).shape[:2]
    return steps, batch


def reserve(input: Tensor, settings: RecurrentSettings) -> int:
    """Return what the backward needs of a training forward, at most; in bytes."""
    steps, batch = extent(input, settings)
    size, directions = input.element_size(), settings.directions
    kept = _KEPT[settings.mode] + bool(settings.proj_size)
    if settings.mode == LSTM and size < 4:
        kept += 1
    cells = _part(steps * batch * settings.hidden_size * size)
    between = _part(steps * batch * _output_size(settings) * size)
    masks = 2 if settings.dropout else 1
    return directions * (
        settings.num_layers * kept * cells + (settings.num_layers - 1) * masks * between
    )


def workspace(input: Tensor, weight: Sequence[Tensor], settings: RecurrentSettings) -> int:
    """Return what every call takes while it runs, at most; in bytes.

    Weights in another order, and for each layer and direction three times the gates, less one.
    """
    steps, batch = extent(input, settings)
    size, layers = input.element_size(), settings.num_layers * settings.directions
    of_step = _part(batch * settings.hidden_size * max(size, 4))
    taken = _PRODUCTS + layers * (3 * GATES[settings.mode] - 1) * of_step
    taken += sum(_part(one.numel() * size) for one in weight if one.dim() > 1)
    if settings.proj_size:
        taken += layers * of_step
    if settings.directions > 1:
        widest = max(input.shape[-1], 2 * _output_size(settings))
        taken += 2 * _part(steps * batch * widest * size)
    return taken if settings.train else taken + reserve(input, settings)


def _output_size(settings: RecurrentSettings) -> int:
    return settings.proj_size or settings.hidden_size


def _part(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
