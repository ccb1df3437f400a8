"""Factories: what makes tensors of numbers alone, or of the type and shape of another."""

from __future__ import annotations

from pytest_torchmem.operators.registry import Kind, operator

# Where they are small their values are known; of random floating ones, single numbers.
operator(
    "aten::arange",
    "aten::bernoulli",
    "aten::bernoulli_",
    "aten::empty",
    "aten::empty_strided",
    "aten::eye",
    "aten::full",
    "aten::linspace",
    "aten::logspace",
    "aten::ones",
    "aten::rand",
    "aten::randint",
    "aten::randn",
    "aten::random_",
    "aten::randperm",
    "aten::range",
    "aten::scalar_tensor",
    "aten::tril_indices",
    "aten::triu_indices",
    "aten::zeros",
    "prims::empty",
    "prims::empty_strided",
    "prims::full",
    "prims::scalar_tensor",
    makes_values=True,
)
operator(
    "aten::full_like",
    "aten::new_full",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::zeros_like",
    "prims::full_like",
    fills=True,
)
operator("aten::fill_", "aten::zero_", overwrites=True)
# One allocation: as well from meta as by their body, and quicker.
operator(
    "aten::empty_like",
    "aten::full_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::zeros_like",
    kind=Kind.LEAF,
)
