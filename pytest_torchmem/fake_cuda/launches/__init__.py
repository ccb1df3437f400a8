"""Kernels that libraries launch beside torch's operators, in a trace on fake cuda."""
