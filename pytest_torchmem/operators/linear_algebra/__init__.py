"""Linear algebra: what is known of these operators."""
