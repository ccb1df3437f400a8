"""Matmul: what is known of these operators."""
