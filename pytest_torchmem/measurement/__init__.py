"""The same step for real, on a real device, as its allocator sees it."""
