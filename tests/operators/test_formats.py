"""What kernels copy to have it in a memory format."""

from typing import Any

import pytest
import torch

from pytest_torchmem.operators.calls import Binding, Unbindable
from pytest_torchmem.operators.workspace import CONTIGUOUS, SUGGESTED, copied
from pytest_torchmem.targets.gpus import find_gpu
from pytest_torchmem.targets.host import REFERENCE
from tests.asked import workspace_of

GPU = find_gpu("a100")
POOL = torch.ops.aten.max_pool2d_with_indices_backward.default


def image(dtype: torch.dtype = torch.float32, **layout: Any) -> torch.Tensor:
    """Return images with 120 elements."""
    return torch.empty(2, 3, 4, 5, dtype=dtype, device="meta").contiguous(**layout)


def asked(function: Any, machine: Any, outputs: Any, gradient: Any, indices: Any) -> Any:
    """Return what a function gives for the backward of a pooling."""
    args = (gradient, image(), [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    return Binding(function, POOL)(args, {}, machine=machine, outputs=outputs)


def test_what_lies_otherwise_is_copied() -> None:
    last = image(memory_format=torch.channels_last)
    indices = image(torch.int64)
    function = copied(grad_output=SUGGESTED, indices="grad_output", outputs="grad_output")
    assert asked(function, GPU, image(), last, indices) == (0, 960, 480)
    assert asked(function, REFERENCE, image(), last, indices) == 960 + 480
    assert asked(function, GPU, image(), image(), indices) == (0, 0, 0)
    assert asked(function, GPU, (last, last), image(), indices) == (0, 0, 480, 480)


def test_an_argument_that_the_operator_lacks_is_refused() -> None:
    with pytest.raises(Unbindable, match="has no argument 'weight'"):
        Binding(copied(weight=CONTIGUOUS), POOL)


def test_only_the_cpu_goes_through_a_block_of_a_transposed_matrix() -> None:
    transposed = torch.empty(100, 80, device="meta").t()
    search = torch.ops.aten.searchsorted.Tensor
    function = copied(sorted_sequence=CONTIGUOUS, self=CONTIGUOUS)
    for machine, expected in ((REFERENCE, 32_000 + 60 * 60 * 4), (GPU, (32_000, 0))):
        found = Binding(function, search)((transposed, torch.empty(3)), {}, machine=machine)
        assert found == expected


def test_a_number_is_not_copied() -> None:
    sequence = torch.empty(4, device="meta")
    assert not workspace_of("searchsorted", REFERENCE, sequence, sequence, 2.0).requests
