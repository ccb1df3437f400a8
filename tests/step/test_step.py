"""The step that a trace and a measurement run says what keeps it from a backward."""

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UsageError


@pytest.mark.parametrize("run", [trace, measure])
def test_a_backward_without_gradients(run: object) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.no_grad():
        for loss_fn in (None, Tensor.sum):
            with pytest.raises(UsageError, match="gradients are off around the step"):
                run(model, x, loss_fn=loss_fn)  # type: ignore[operator]
        run(model, x, backward=False)  # type: ignore[operator]
