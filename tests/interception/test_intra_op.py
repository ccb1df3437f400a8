"""Small kernels that a trace runs for values keep to their thread; no other thread notices."""

from collections.abc import Iterator

import pytest
import torch

from pytest_torchmem.torch_private.settings import OneThread
from tests.processes import in_thread
from tests.results import in_a_trace


@pytest.fixture(autouse=True)
def _several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(torch.get_num_threads() == 1, reason="torch was built for one thread")
def test_other_threads_keep_theirs() -> None:
    with OneThread():
        seen = torch.get_num_threads(), in_thread(torch.get_num_threads)
    assert seen == (1, 2)
    assert torch.get_num_threads() == 2


def test_an_error_gives_the_threads_back() -> None:
    with pytest.raises(ValueError, match="kernel"), OneThread():
        raise ValueError("of a kernel")
    assert torch.get_num_threads() == 2


@in_a_trace()
def test_a_traced_program_sees_what_it_set() -> None:
    assert torch.ones(64, 64, dtype=torch.bool).tril().sum().item() == 64 * 65 // 2
    assert torch.get_num_threads() == 2
