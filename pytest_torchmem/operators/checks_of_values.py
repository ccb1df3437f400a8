"""What kernels refuse by values: indices out of range, probabilities that are none.

The kernels of the CPU raise, those of CUDA end the process's context by an assertion on the device:
both are told in the CPU's words. What is known of all of an operator's tensors is given to its
kernel; where the numbers are too many to be known and the positions are, these are looked at here.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from pytest_torchmem.operators.registry import aten, operator

Known = Callable[[Tensor], Tensor | None]
"""Returns the values of a tensor, where they are known."""

operator(
    *aten(
        "_ctc_loss _dirichlet_grad _embedding_bag _embedding_bag_forward_only _sample_dirichlet "
        "_standard_gamma bernoulli bernoulli_ binary_cross_entropy binomial bincount "
        "cross_entropy_loss embedding gather index_add index_add_ index_copy index_copy_ "
        "index_reduce index_reduce_ index_select max_unpool2d max_unpool3d multi_margin_loss "
        "multilabel_margin_loss_forward multinomial nll_loss2d_forward nll_loss_forward normal "
        "poisson put_ scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ take"
    ),
    refuses_values=True,
)


def _out_of(known: Known, tensor: Tensor, low: int, high: int) -> int | None:
    """Return the first of a tensor's positions, if they are known, that is not in a range."""
    positions = known(tensor)
    if positions is None or not positions.numel():
        return None
    least, most = positions.aminmax()
    if int(least) >= low and int(most) < high:
        return None
    flat = positions.reshape(-1)
    return int(flat[(flat < low) | (flat >= high)][0])


@operator("aten::embedding").check_values()
def rows(known: Known, weight: Tensor, indices: Tensor) -> None:
    """native/cpu/IndexKernel.cpp, index_select_out_cpu_ of the weight."""
    selected(known, weight, 0, indices)


@operator("aten::_embedding_bag", "aten::_embedding_bag_forward_only").check_values()
def rows_of_bags(known: Known, weight: Tensor, indices: Tensor) -> None:
    """native/EmbeddingBag.cpp, which looks at every index before it adds up rows."""
    wrong, found = _out_of(known, indices, 0, weight.shape[0]), known(indices)
    if found is not None and wrong is not None:
        position = int((found.reshape(-1) == wrong).nonzero()[0])
        raise RuntimeError(
            f"Index {position} of input takes value {wrong} which is not in the valid range [0, "
            f"{weight.shape[0]})"
        )


@operator("aten::index_select").check_values()
def selected(known: Known, input: Tensor, dim: int, index: Tensor) -> None:
    """native/TensorAdvancedIndexing.cpp, index_select_out_cpu_."""
    if input.dim() and _out_of(known, index, 0, input.shape[dim]) is not None:
        raise IndexError("index out of range in self")


@operator(
    *aten("gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_")
).check_values()
def along_dimension(known: Known, input: Tensor, dim: int, index: Tensor) -> None:
    """native/cpu/ScatterGatherKernel.cpp."""
    wrong = _out_of(known, index, 0, input.shape[dim]) if input.dim() else None
    if wrong is not None:
        raise RuntimeError(
            f"index {wrong} is out of bounds for dimension {dim % input.dim()} with size "
            f"{input.shape[dim]}"
        )


@operator("aten::nll_loss_forward", "aten::nll_loss2d_forward").check_values()
def classes(known: Known, input: Tensor, target: Tensor, ignore_index: int = -100) -> None:
    """native/LossNLL.cpp, nll_loss_out_frame, and native/LossNLL2d.cpp."""
    found = known(target)
    if found is None:
        return
    size = input.shape[1 if input.dim() > 1 else 0]
    wrong = _out_of(lambda classes: classes, found[found != ignore_index], 0, size)
    if wrong is not None:
        raise IndexError(f"Target {wrong} is out of bounds.")


@operator("aten::index.Tensor", "aten::index_put_").check_values()
def indexed(known: Known, input: Tensor, indices: Sequence[Tensor | None]) -> None:
    """native/cpu/IndexKernelUtils.h, Indexer::get."""
    dimension = 0
    for index in indices:
        if index is not None and not index.dtype.is_signed:  # a mask
            dimension += index.dim()
            continue
        size = input.shape[dimension]
        wrong = None if index is None else _out_of(known, index, -size, size)
        if wrong is not None:
            raise IndexError(
                f"index {wrong} is out of bounds for dimension {dimension} with size {size}"
            )
        dimension += 1


def check_masks(input: Tensor, indices: Sequence[Tensor | None]) -> None:
    """Raise what expandTensors does for a mask of another shape; native/IndexingUtils.h."""
    dimension = 0
    for index in indices:
        if index is None or index.dtype.is_signed:
            dimension += 1
            continue
        for side, size in enumerate(index.shape):
            place = dimension + side
            if place < input.dim() and size != input.shape[place]:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {side} does not match the "
                    f"shape of the indexed tensor {list(input.shape)} at index {place}"
                )
        dimension += index.dim()
