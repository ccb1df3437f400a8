"""Random: what is known of these operators."""
