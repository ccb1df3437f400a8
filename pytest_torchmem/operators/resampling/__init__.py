"""Resampling: what is known of these operators."""
