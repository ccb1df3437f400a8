"""Which oneDNN a version of torch is built with: ``third_party/ideep``'s submodule ``mkl-dnn``."""

from __future__ import annotations

from pytest_torchmem.torch_private.version import TORCH_VERSION

#: By the first version of torch that has it. The build that runs is not asked: one without oneDNN
#: stands for the same reference host.
_RELEASES = {(2, 15): (3, 13), (2, 13): (3, 12), (2, 12): (3, 11), (2, 11): (3, 10)}

RELEASE = next((release for first, release in _RELEASES.items() if first <= TORCH_VERSION), (3, 10))
"""Major and minor version of oneDNN."""
