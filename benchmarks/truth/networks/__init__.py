"""The recorded models, in plain torch, by family; each at a size of hundreds of MiB and a tiny one.

Nothing here imports ``pytest_torchmem``: the machine that records needs torch alone.
"""

from benchmarks.truth.networks import convolutional, dense, diffusion, recurrent, transformers
from benchmarks.truth.networks.registry import NETWORKS, Network

__all__ = [
    "NETWORKS",
    "Network",
    "convolutional",
    "dense",
    "diffusion",
    "recurrent",
    "transformers",
]
