"""The meta profiler: a training step on a device that does not have to exist.

Nothing here knows of pytest. Imports point downwards: ``trace`` uses everything, ``ledger`` and
``profile`` use nothing.
"""
