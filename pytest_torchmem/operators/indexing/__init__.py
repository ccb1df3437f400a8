"""Indexing: what is known of these operators."""
