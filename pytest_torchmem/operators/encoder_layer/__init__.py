"""Encoder layer: what is known of these operators."""
