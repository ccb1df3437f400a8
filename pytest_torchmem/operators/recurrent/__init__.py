"""Recurrent: what is known of these operators."""
