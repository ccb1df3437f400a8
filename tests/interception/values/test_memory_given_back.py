"""The memory that holds values goes with the storages that they belong to."""

import gc

import torch

import pytest_torchmem as torchmem


def test_values_of_what_is_gone_take_no_memory() -> None:
    alive: list[int] = []

    def program() -> None:
        for _ in range(8):
            torch.rand(500, 500).sum()
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        alive.append(sum(one.nbytes == 1_000_000 for one in tensors))

    torchmem.trace(program, values="real")
    assert alive[0] <= 2
