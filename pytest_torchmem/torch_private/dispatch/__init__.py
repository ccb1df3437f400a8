"""Dispatch keys, kernels and operators, and the modes that are asked before them."""
