"""Factories: what makes tensors of numbers alone, or of the type and shape of another."""

from __future__ import annotations

from pytest_torchmem.operators.registry import Kind, aten, operator

# Where they are small their values are known; of random floating ones, single numbers.
operator(
    *aten("""
        arange bernoulli bernoulli_ empty empty_strided eye full linspace logspace ones rand
        randint randn random_ randperm range scalar_tensor tril_indices triu_indices zeros
    """),
    "prims::empty",
    "prims::empty_strided",
    "prims::full",
    "prims::scalar_tensor",
    makes_values=True,
)
operator(
    *aten("full_like new_full new_ones new_zeros ones_like zeros_like"),
    "prims::full_like",
    fills=True,
)
operator("aten::fill_", "aten::zero_", overwrites=True)
# One allocation: as well from meta as by their body, and quicker.
operator(
    *aten(
        "empty_like full_like new_empty new_empty_strided new_ones new_zeros ones_like zeros_like"
    ),
    kind=Kind.LEAF,
)
