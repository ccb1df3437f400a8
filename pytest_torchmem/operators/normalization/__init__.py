"""Normalization: what is known of these operators."""
