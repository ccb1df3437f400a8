"""Snapshots: the file format, the store, comparison, and what an update changes."""
