"""Calibration files: what was measured on GPUs, kept beside the snapshots that stand on it."""
