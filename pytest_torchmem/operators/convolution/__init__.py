"""Convolution: what is known of these operators."""
