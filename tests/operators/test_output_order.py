"""The order in which CUDA kernels make their outputs."""

from collections.abc import Callable

import pytest
import torch

import pytest_torchmem as torchmem


def dropout() -> None:
    torch.nn.functional.dropout(torch.ones(4096, device="cuda"), 0.5)


def gru_cell() -> None:
    cell = torch.nn.GRUCell(8, 64, device="cuda")
    cell(torch.ones(2, 8, device="cuda"))


def lstm_cell() -> None:
    cell = torch.nn.LSTMCell(8, 64, device="cuda")
    cell(torch.ones(2, 8, device="cuda"))


def embedding_bag() -> None:
    table = torch.ones(50, 24, device="cuda")
    words = torch.zeros(40, dtype=torch.long, device="cuda")
    bags = torch.zeros(3, dtype=torch.long, device="cuda")
    torch._embedding_bag(table, words, bags)


@pytest.mark.parametrize(
    ("program", "made"),
    [  # bytes, in the order of native/cuda/Dropout.cu, RNN.cu and EmbeddingBag.cu
        (dropout, [4096, 16_384]),
        (gru_cell, [2 * 5 * 64 * 4, 2 * 64 * 4]),
        (lstm_cell, [2 * 4 * 64 * 4, 2 * 64 * 4, 2 * 64 * 4]),
        (embedding_bag, [3 * 8, 40 * 8, 3 * 24 * 4]),
    ],
)
@pytest.mark.parametrize("repeated", [1, 2])  # as planned, and as remembered
def test_outputs_are_made_in_the_kernels_order(
    program: Callable[[], None], made: list[int], repeated: int
) -> None:
    def several() -> None:
        for _ in range(repeated):
            program()

    profile = torchmem.trace(several, device="cuda", gpu="a100")
    sizes = [
        allocation.nbytes
        for allocation in profile.timeline.allocations
        if any(part in allocation.origin.operator for part in ("dropout", "_cell", "_bag"))
    ]
    assert [size for size in sizes if size] == made * repeated


def test_on_the_host_the_order_is_that_of_what_is_returned() -> None:
    def program() -> None:
        torch.native_dropout(torch.ones(4096), 0.5, True)

    profile = torchmem.trace(program, device="cpu")
    sizes = [
        allocation.nbytes
        for allocation in profile.timeline.allocations
        if "dropout" in allocation.origin.operator
    ]
    assert sizes[:2] == [16_384, 4096]
