"""Attention: what is known of these operators."""
