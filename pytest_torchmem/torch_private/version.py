"""Which torch this is, where what torch does differs between versions."""

from __future__ import annotations

import torch

#: Major and minor version.
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
TORCH_SERIES = ".".join(map(str, TORCH_VERSION))
