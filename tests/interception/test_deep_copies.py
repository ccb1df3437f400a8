"""``copy.deepcopy`` of tensors in a trace: whole storages, and what shared one goes on to."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from pytest_torchmem import measure, trace
from tests.results import result_of

COPIES: dict[str, Callable[[Tensor], object]] = {
    "a tensor": deepcopy,
    "a slice": lambda x: deepcopy(x[:2]),
    "an expanded tensor": lambda x: deepcopy(torch.ones(1, device=x.device).expand(5000)),
    "views of one storage": lambda x: deepcopy({"whole": x, "part": x[5:], "rows": x.view(-1, 4)}),
    "strides": lambda x: deepcopy(x.view(-1, 4).t()),
    "nothing": lambda x: deepcopy(x.new_empty(0)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_storage_is_copied_as_a_whole(copied: Callable[[Tensor], object]) -> None:
    def program(device: str = "cpu") -> object:
        return copied(torch.ones(1000, device=device))

    assert trace(program, host="here").figures() == measure(program).figures()
    traced = trace(lambda: program("cuda"), device="cuda")
    assert (traced.peak, traced.retained) == (measure(program).peak, measure(program).retained)


def test_copies_of_views_share_what_their_originals_did(device: str) -> None:
    def program(device: str) -> tuple[object, ...]:
        whole = torch.arange(12, device=device)
        whole.told = {"by": [1]}  # type: ignore[attr-defined]
        other = deepcopy([whole, whole.view(3, 4), whole])
        other[0][5] = 50
        assert other[0].told["by"] is not whole.told["by"]  # type: ignore[attr-defined]
        views = other[1].tolist(), whole.tolist(), other[0] is other[2], other[1]._is_view()
        weight = torch.ones(4, 2, device=device).t().detach().requires_grad_()
        weight.sum().backward()
        copy = deepcopy(weight)
        return *views, copy.stride(), copy.is_leaf, copy.requires_grad, copy.grad is not None

    assert result_of(lambda: program(device), device=device) == program("cpu")
