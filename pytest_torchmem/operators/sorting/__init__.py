"""Sorting: what is known of these operators."""
