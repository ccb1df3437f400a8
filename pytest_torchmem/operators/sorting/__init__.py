"""Order: sorting and searching, distinct elements, prefix sums."""
