"""Reduction: what is known of these operators."""
