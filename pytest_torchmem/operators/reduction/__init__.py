"""Reductions to fewer elements: sums, norms, moments, extremes."""
