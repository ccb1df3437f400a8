"""Softmax: what is known of these operators."""
