"""Embedding: what is known of these operators."""
