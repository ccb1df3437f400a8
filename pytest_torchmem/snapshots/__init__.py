"""Snapshot and calibration files: format, atomic store, comparison."""
