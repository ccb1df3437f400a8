"""Whole numbers of blocks."""

from __future__ import annotations


def ceil_div(amount: int, parts: int) -> int:
    """Return ``amount`` divided by ``parts``, rounded up."""
    return -(-amount // parts)


def round_up(amount: int, multiple: int) -> int:
    """Return ``amount`` in whole multiples."""
    return ceil_div(amount, multiple) * multiple
