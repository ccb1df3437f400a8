"""Operators of other packages, described when one of theirs is first met."""
