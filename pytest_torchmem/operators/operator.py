"""How an operator is treated by a trace: read once from its schema, tags and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

from pytest_torchmem.torch_private.operators import (
    OpOverload,
    is_composite_explicit,
    is_composite_implicit,
    is_opaque,
    schema,
)
from pytest_torchmem.torch_private.version import TORCH_VERSION


class Treatment(Enum):
    """What the interceptor does with an operator."""

    LEAF = "its outputs are made hollow, with the geometry it has on meta"
    IMPLICIT = "it is decomposed into the operators it is made of"
    NATIVE = "it runs as it is: it makes no storage and reads no data"
    SCALAR = "it hands a value to Python"
    LIFT = "it brings a tensor made of Python numbers into the trace"
    RESIZE = "it changes the size of a storage"
    COMPRESSED = "it makes a compressed sparse tensor of others"
    NESTED = "it makes a nested tensor of others, or what one is made of"
    PASS = "it checks data and decides nothing"


_BY_NAME = {
    "aten::_local_scalar_dense": Treatment.SCALAR,
    "aten::lift_fresh": Treatment.LIFT,
    "aten::resize_": Treatment.RESIZE,
    "aten::_sparse_compressed_tensor_unsafe": Treatment.COMPRESSED,
    "aten::_sparse_compressed_tensor_with_dims": Treatment.COMPRESSED,
    "aten::_to_sparse_bsc": Treatment.COMPRESSED,
    "aten::_to_sparse_bsr": Treatment.COMPRESSED,
    "aten::_to_sparse_csc": Treatment.COMPRESSED,
    "aten::_to_sparse_csr": Treatment.COMPRESSED,
    "aten::sparse_compressed_tensor.comp_plain_value": Treatment.COMPRESSED,
    "aten::sparse_compressed_tensor.comp_plain_value_size": Treatment.COMPRESSED,
    "aten::_nested_from_padded": Treatment.NESTED,
    "aten::_nested_tensor_from_mask": Treatment.NESTED,
    "aten::_nested_tensor_from_mask_left_aligned": Treatment.NESTED,
    "aten::_nested_tensor_from_tensor_list": Treatment.NESTED,
    "aten::_padded_dense_to_jagged_forward": Treatment.NESTED,
    # Answers that depend on geometry and settings alone, asked by C++ composites.
    "aten::_fused_sdp_choice": Treatment.NATIVE,
    "aten::is_same_size": Treatment.NATIVE,
    "aten::_has_same_storage_numel": Treatment.NATIVE,
    "aten::_nested_tensor_size": Treatment.NATIVE,
    "aten::is_pinned": Treatment.NATIVE,
    "aten::_debug_has_internal_overlap": Treatment.NATIVE,
    "aten::_version": Treatment.NATIVE,
    "aten::_use_cudnn_ctc_loss": Treatment.NATIVE,
    "aten::_assert_tensor_metadata": Treatment.NATIVE,
    # It makes a sparse tensor of the indices and values that it is given.
    "aten::_sparse_coo_tensor_with_dims_and_tensors": Treatment.NATIVE,
    "aten::sym_size.int": Treatment.NATIVE,
    "aten::sym_stride.int": Treatment.NATIVE,
    "aten::sym_numel": Treatment.NATIVE,
    "aten::sym_storage_offset": Treatment.NATIVE,
}

#: Operators whose body asks something of data that decides nothing here (whether it is finite,
#: whether a factorisation succeeded): they pass.
_PASSING = frozenset(
    {
        "aten::_assert_async",
        "aten::_assert_async.msg",
        "aten::_linalg_check_errors",
    }
)

#: Composite operators whose body is not run. Of convolutions it depends on libraries (oneDNN,
#: cuDNN), which are chosen by data type and device: they are one kernel to the workspace functions.
_LEAVES = frozenset(
    {
        "aten::convolution",
        "aten::convolution_backward",
        "aten::_convolution",
        "aten::convolution_overrideable",
        "aten::convolution_backward_overrideable",
        "aten::mkldnn_convolution",
        "aten::_nnpack_spatial_convolution",
        # Registered for every backend, and reading and writing data all the same.
        "aten::copy_",
        "aten::_grid_sampler_2d_cpu_fallback",
        "aten::_grid_sampler_2d_cpu_fallback_backward",
        "aten::_grouped_mm",
        "aten::_pack_padded_sequence",
        "aten::_philox_normal",
        "aten::_philox_uniform",
        "aten::embedding_renorm",
        "aten::linalg_lstsq",
        # One allocation and one copy: as well from meta, and quicker.
        "aten::clone",
        "aten::_to_copy",
        "aten::empty_like",
        "aten::zeros_like",
        "aten::ones_like",
        "aten::new_zeros",
        "aten::new_ones",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::full_like",
        "aten::_unsafe_view",
        "aten::stack",
    }
)

#: Made of a power and a product up to torch 2.13, and then one kernel for every backend.
if TORCH_VERSION >= (2, 14):
    _LEAVES |= {"aten::ldexp.Tensor", "aten::ldexp_"}

#: Operators whose indices may be boolean masks, which stand for as many rows as are true.
_MASKS = frozenset(
    {
        "aten::index.Tensor",
        "aten::_unsafe_index.Tensor",
        "aten::index_put_",
        "aten::index_put",
        "aten::_unsafe_index_put",
        "aten::_index_put_impl_",
    }
)

#: Operators whose outputs' shape depends on data although they are not tagged so.
_DYNAMIC = frozenset({"aten::_pack_padded_sequence"})

#: Factories whose values are known where they are small; of random floating ones, single numbers.
_KNOWN_FACTORIES = frozenset(
    {
        "arange",
        "bernoulli",
        "bernoulli_",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "random_",
        "randperm",
        "range",
        "scalar_tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
    }
)


#: Factories whose values do not depend on those of the tensor that they take type and shape of.
_FILLING = frozenset({"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"})


@dataclass(slots=True, eq=False)
class Operator:
    """What a trace has to know of one operator."""

    overload: OpOverload
    name: str
    treatment: Treatment
    composite: bool
    """Whether its body is a sequence of other operators, to be run for what it allocates."""
    opaque: bool
    """Whether its kernel is not run for values: a user's own, described without it, or c10d's."""
    dynamic: bool
    """Whether the shape of its outputs depends on data."""
    random: bool
    masks: bool
    tensors: tuple[int, ...]
    """Positions of the arguments that are always tensors."""
    argument_names: tuple[str, ...]
    mutated: tuple[int, ...]
    """Positions of the arguments it writes to."""
    mutated_names: tuple[str, ...]
    """Keyword-only arguments it writes to (``out=``)."""
    overwrites: bool
    """Whether what it writes to needs no value before (``zero_``, ``fill_``, ``copy_``)."""
    takes_device: bool
    """Whether it has a ``device`` argument."""
    makes_values: bool
    """Whether it is a factory whose values are worth knowing."""
    fills: bool
    """Whether it makes values that do not depend on those of its tensors."""

    @classmethod
    def read(cls, overload: OpOverload) -> Operator:
        """Return what is to be known of ``overload``, from its schema."""
        name = str(overload.name())
        base = name.partition("::")[2].partition(".")[0]
        arguments = schema(overload).arguments
        collective = overload.namespace == "c10d"
        written = [
            (position, argument)
            for position, argument in enumerate(arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or (collective and _is_received(name, str(argument.name)))
        ]
        tags = overload.tags
        # A collective is not run on known values either: other processes would have to be there.
        opaque = collective or is_opaque(overload)
        return cls(
            overload=overload,
            name=name,
            treatment=_treatment(overload, name),
            composite=is_composite_explicit(overload) and name not in _LEAVES and not opaque,
            opaque=opaque,
            dynamic=name in _DYNAMIC
            or (
                name not in _MASKS
                and (
                    torch.Tag.dynamic_output_shape in tags
                    or torch.Tag.data_dependent_output in tags
                )
            ),
            random=torch.Tag.nondeterministic_seeded in tags,
            masks=name in _MASKS,
            tensors=tuple(
                position
                for position, argument in enumerate(arguments)
                if not argument.kwarg_only and str(argument.type) == "Tensor"
            ),
            argument_names=tuple(str(argument.name) for argument in arguments),
            mutated=tuple(position for position, argument in written if not argument.kwarg_only),
            mutated_names=tuple(argument.name for _, argument in written if argument.kwarg_only),
            overwrites=base in ("zero_", "fill_", "copy_"),
            takes_device=any(argument.name == "device" for argument in arguments),
            makes_values=base in _KNOWN_FACTORIES,
            fills=base in _FILLING,
        )

    def numbers(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Return the positions of Python numbers that C++ wrapped in tensors of no dimension.

        A fallback gets the number where C++ made such a tensor of one.
        """
        return tuple(
            position
            for position in self.tensors
            if position < len(args) and isinstance(args[position], (bool, int, float, complex))
        )

    def with_numbers_as_tensors(self, args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
        """Return arguments that can be handed to the operator from Python.

        Only some operators take a number back where they want a tensor
        (torch/csrc/utils/python_arg_parser.cpp, should_allow_numbers_as_tensors). The tensor's
        dtype is the one that leaves the result's dtype as it is with a wrapped number.
        """
        positions = self.numbers(args)
        if not positions:
            return args
        first = next((item for item in args if isinstance(item, torch.Tensor)), None)
        converted = list(args)
        for position in positions:
            dtype = _dtype_beside(first, args[position])
            converted[position] = torch.full((), args[position], dtype=dtype, device=device)
        return tuple(converted)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that this call writes to."""
        return [args[position] for position in self.mutated if position < len(args)] + [
            kwargs[name] for name in self.mutated_names if name in kwargs
        ]


def _dtype_beside(tensor: torch.Tensor | None, number: complex) -> torch.dtype | None:
    if tensor is None or isinstance(number, bool) or tensor.dtype is torch.bool:
        return None
    if isinstance(number, complex):
        return tensor.dtype if tensor.is_complex() else None
    integral = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return None if isinstance(number, float) and integral else tensor.dtype


def _is_received(name: str, argument: str) -> bool:
    """Return whether a collective writes what is not this process's own value to an argument.

    Their schemas (torch/csrc/distributed/c10d/Ops.cpp) do not say. What ``broadcast_`` and the
    reductions in place write to keeps what is known of it, as if this process were the only one.
    """
    return argument.startswith("output") or name.startswith("c10d::recv")


@cache
def operator_of(overload: OpOverload) -> Operator:
    """Return what is to be known of ``overload``."""
    return Operator.read(overload)


def _treatment(overload: OpOverload, name: str) -> Treatment:
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    if name in _PASSING:
        return Treatment.PASS
    if is_composite_implicit(overload):
        return Treatment.IMPLICIT
    if overload.is_view and not name.startswith("aten::_unsafe"):
        return Treatment.NATIVE
    if torch.Tag.inplace_view in overload.tags:  # ``transpose_`` changes no more than metadata
        return Treatment.NATIVE
    if "Tensor" not in str(schema(overload)):  # marks for a profiler, arithmetic on shapes
        return Treatment.NATIVE
    return Treatment.LEAF
