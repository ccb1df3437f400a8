"""What tests of workspaces share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads of torch, on the machine itself and so on the host of a trace."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
