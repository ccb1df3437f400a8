"""Nested: what is known of these operators."""
