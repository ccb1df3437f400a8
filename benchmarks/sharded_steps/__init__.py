"""Traces of one rank, compared with real processes on the CPU that send with gloo."""
