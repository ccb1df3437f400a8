"""Losses: what is known of these operators."""
