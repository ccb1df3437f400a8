"""How sure it is what oneDNN takes: as sure as a host is one that was checked."""

from __future__ import annotations

import torch

from pytest_torchmem.operators.workspace import Workspace, estimate
from pytest_torchmem.targets.host import Host


def by_onednn(host: Host, dtype: torch.dtype, nbytes: int) -> int | Workspace:
    """Return a workspace of oneDNN's: an estimate, on a host that was not checked."""
    return nbytes if host.is_checked(dtype) else estimate(nbytes)
