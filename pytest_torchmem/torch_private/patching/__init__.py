"""Replacing functions of torch for the length of a trace."""
