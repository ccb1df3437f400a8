"""Profiles in formats that other programs read."""
