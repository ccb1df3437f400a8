"""ATen's own convolutions, by columns and matrix products.

native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveConvolutionTranspose2d.cpp and 3d.cpp,
NaiveDilatedConvolution.cpp, and their kin in native/cuda/; groups are computed one after the other
(native/Convolution.cpp).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import ConvolutionSettings
from pytest_torchmem.operators.convolution.choice import Convolution
from pytest_torchmem.operators.elementwise import sum_buffers
from pytest_torchmem.operators.libraries.nvidia import blas_buffer
from pytest_torchmem.operators.workspace import (
    ALL,
    FLOAT,
    First,
    Made,
    Request,
    beyond,
    contiguous_copy,
    dense_bytes,
    passing,
)
from pytest_torchmem.targets.gpus import Gpu


def _columns(call: Convolution, result: Tensor) -> int:
    """Bytes of the columns of one image, and one group where groups are computed apart."""
    taps = math.prod(call.weight.shape[2:])
    if call.settings.transposed:
        rows, pixels = call.weight.shape[1], call.input.shape[2:]
    else:
        rows, pixels = call.weight.shape[1], result.shape[2:]
        rows *= 1 if _is_apart(call) else call.settings.groups
    return int(rows * taps * math.prod(pixels)) * call.input.element_size()


def _is_pointwise(call: Convolution) -> bool:
    """One pixel, no stride and no padding: the image is its own columns."""
    return (
        math.prod(call.weight.shape[2:]) == 1
        and all(step == 1 for step in call.settings.stride)
        and not any(call.settings.padding)
        and (call.settings.groups == 1 or _is_apart(call))
    )


def _is_apart(call: Convolution) -> bool:
    """Whether groups are computed one after the other; a kernel for volumes knows of groups."""
    return call.settings.groups > 1 and (
        call.dims < 3 or call.settings.transposed or call.is_dilated
    )


def forward(call: Convolution, output: Tensor) -> int:
    """Bytes of a forward beyond its output: contiguous operands, and columns of the whole batch,
    of one image where volumes are transposed or where kernels are dilated.
    """
    columns, batch, layout = _columns(call, output), call.input.shape[0], call.memory_format
    copies = contiguous_copy(call.input, layout) + contiguous_copy(call.weight, layout)
    if call.settings.transposed:
        columns *= batch if call.dims < 3 else 1
        if call.dims == 3:
            if call.bias:
                columns += math.prod(output.shape[2:]) * output.element_size()
            groups = call.settings.groups if _is_apart(call) else 1
            columns = max(columns, dense_bytes(call.input) // groups)  # until the output is there
    elif _is_pointwise(call) and not call.is_dilated:
        columns = 0
    elif not call.is_dilated:
        columns *= batch
    if _is_apart(call):
        apart = dense_bytes(call.input) // call.settings.groups if batch > 1 else 0
        return copies + max(dense_bytes(output), apart + columns)
    return copies + columns


def backward(call: Convolution, grad_output: Tensor, returned: int, mask: Sequence[bool]) -> int:
    """Bytes beyond the gradients: the input's by its columns, then the weight's by the input's."""
    columns, batch, layout = _columns(call, grad_output), call.input.shape[0], call.memory_format
    gradient = contiguous_copy(grad_output, layout)
    input, weight = contiguous_copy(call.input, layout), contiguous_copy(call.weight, layout)
    dilated = call.is_dilated and not call.settings.transposed
    pointwise = _is_pointwise(call) and not call.is_dilated
    summed = grad_output.shape[1] * grad_output.element_size() if mask[2] else 0
    bias = summed if dilated else 0
    together = dilated or (call.dims < 3 and not call.settings.transposed)
    volumes_turned = call.settings.transposed and call.dims == 3
    if not (mask[0] or mask[1] or volumes_turned or _is_apart(call)):
        # The others sum the gradient as it is.
        return weight + (input + gradient + bias if dilated else 0)
    if not call.settings.transposed and not dilated:
        columns = 0 if pointwise and call.dims < 3 else columns * batch
    elif call.settings.transposed and pointwise:
        columns = 0
    if _is_apart(call):
        apart = gradient // call.settings.groups
        operands = (dense_bytes(grad_output) + dense_bytes(call.input)) // call.settings.groups
        if layout != torch.contiguous_format:
            apart += operands
        elif batch > 1:
            apart = operands
        in_float = call.settings.transposed and call.dims < 3 and batch > 1 and mask[2]
        if in_float and grad_output.element_size() < FLOAT:
            # One group's sum, before the gradient of its weight is made.
            added = (grad_output.numel() + grad_output.shape[1]) * FLOAT - dense_bytes(call.weight)
            columns = max(columns, added // call.settings.groups)
        return input + weight + max(returned, apart + columns)
    if together:
        if dilated or mask[1]:
            return gradient + columns + bias + weight + input
        # Columns of the input's gradient are of ``new[]``, not of the allocator; the bias's
        # gradient is summed when the kernel is done.
        return weight + max(0, gradient - summed)
    first = dense_bytes(call.input) if mask[0] else 0
    from_input = 0 if pointwise and not call.settings.transposed else columns
    requests = [weight + gradient + (input if volumes_turned else 0)]
    if mask[0]:
        requests += [first + columns, -columns]
    if not call.settings.transposed:
        requests += [-weight]
    if mask[1] or (mask[2] and volumes_turned):
        requests += [returned - first + (0 if volumes_turned else input) + from_input]
    elif mask[2]:
        requests += [-gradient, returned - first]
    return beyond(returned, requests)


class OnCuda:
    """A convolution by ATen's kernels on a GPU, of images: ``result`` is the output, or its
    gradient. Groups are convolved one after the other, each on dense parts.

    native/Convolution.cpp (``_convolution``, ``convolution_backward``, ``subtensor``).
    """

    def __init__(
        self, gpu: Gpu, input: Tensor, weight: Tensor, result: Tensor, settings: ConvolutionSettings
    ) -> None:
        groups, transposed = settings.groups, settings.transposed
        taps, size, sizes = math.prod(weight.shape[2:]), input.element_size(), result.shape[2:]
        wide = weight.shape[1] if transposed else input.shape[1] // groups
        columns = wide * taps * math.prod((input if transposed else result).shape[2:]) * size
        self._gpu, self._dtype, self._blas = gpu, input.dtype, blas_buffer(gpu)
        self._batch, self._groups, self._transposed = input.shape[0], groups, transposed
        self._channels, self._sizes = result.shape[1] // groups, sizes
        self._ones, self._bias = math.prod(sizes) * size, self._channels * size
        self._each = [dense_bytes(one) // groups for one in (input, weight, result)]
        self._copies = contiguous_copy(input), contiguous_copy(weight)
        self._copied = contiguous_copy(result)
        volumes, is_dilated = input.dim() == 5, {*settings.dilation} != {1}
        # Those for dilated kernels take all volumes; native/cuda/NaiveDilatedConvolution.cu.
        self._dilated = not transposed and (volumes or is_dilated)
        # Transposed volumes are made like the input, and then resized.
        self._grows = transposed and volumes
        pointwise = taps == 1 and {*settings.stride} == {1} and not any(settings.padding)
        self._columns = columns
        self._needed = 0 if pointwise and not is_dilated else columns

    def forward(self, bias: bool) -> tuple[Request, ...]:
        """The output, then columns of one image; slow_conv2d_forward, slow_conv_dilated2d_cuda,
        slow_conv_transpose2d_out_cuda_template, slow_conv_transpose3d_out_cuda_template.
        """
        input, _, output = self._each
        columns = self._columns if self._transposed or self._dilated else self._needed
        ones = self._ones if self._transposed and bias else 0
        within = passing(columns, ones, self._blas)
        if self._groups == 1:
            return passing(*self._copies, *self._made(ALL), *within)
        kept = max(output, input) if self._grows else output
        return passing(*self._copies, *self._apart(0, (*self._made(output), *within), [kept]))

    def _apart(
        self, copied: int, within: Sequence[Request], kept: Sequence[int]
    ) -> tuple[Request, ...]:
        """Return the requests of all groups, of which these sizes are alive until the end."""
        part, requests = self._each[0] if self._batch > 1 else 0, list[Request]()
        for group in range(self._groups):
            requests += [copied, part, *within]
            if part:
                requests.append(First(part, group * kept.count(part) + (copied == part)))
            if copied:
                requests.append(First(copied, group * kept.count(copied)))
        freed = (First(size) for size in reversed(kept) for _ in range(self._groups))
        return *requests, ALL, *freed

    def _made(self, output: Request) -> tuple[Request, ...]:
        input, _, nbytes = self._each
        if self._grows and nbytes > input:
            return input, output, -input
        return (input if self._grows and output is not ALL else output,)

    def backward(self, mask: Sequence[bool]) -> tuple[Request, ...]:
        """Gradients by columns of one image, from a dense gradient."""
        input, weight, result = self._each
        if self._groups == 1:
            outputs = [(Made(at),) * wanted for at, wanted in enumerate(mask)]
            return passing(*self._copies, *self._gradients(self._copied, outputs))
        sizes = zip((input, weight, self._bias), mask, strict=True)
        made = [(size,) * wanted for size, wanted in sizes]
        copied = result if self._copied or self._batch > 1 else 0
        kept = [size for of_one in made for size in of_one]
        return passing(*self._copies, *self._apart(copied, self._gradients(0, made), kept))

    def _gradients(self, copy: int, made: Sequence[Sequence[Request]]) -> tuple[Request, ...]:
        """Return the requests of one kernel that makes gradients of input, weight and bias.

        slow_conv2d_backward_out_cuda, slow_conv_dilated2d_backward_cuda,
        slow_conv_transpose2d_backward_out_cuda_template and its kin for volumes.
        """
        input, weight, bias = map(tuple[Request, ...], made)
        some = bool(input or weight)
        needed = self._needed if self._transposed else self._columns * some
        columns: tuple[Request, ...] = (needed, self._blas) if some else (needed,)
        ended = -needed, -copy
        if self._dilated:
            images = passing(self._bias, *self._sums()) * self._batch if bias else ()
            return copy, *input, *weight, *bias, *columns, *images, *ended
        sums = passing(*self._sums(self._batch)) if bias else ()
        if not self._transposed:
            early, late = (columns, ()) if input else ((), columns)
            return copy, *input, *early, *bias, *sums, *weight, *late, *ended
        first = (copy, *input, *columns, *ended) if input else ()
        last = (copy, *columns, *sums, *ended) if weight or bias else ()
        return *first, *weight, *bias, *last

    def _sums(self, *batch: int) -> tuple[int, ...]:
        """Return the buffers of the sum of a dense gradient over all but its channels."""
        shape = (*batch, self._channels, *self._sizes)
        dims = [dim for dim in range(len(shape)) if dim != len(batch)]
        return sum_buffers(self._gpu, shape, dims, self._dtype)
