"""All the steps: importing this fills the registry."""

from benchmarks.libraries import (
    diffusion as diffusion,
)
from benchmarks.libraries import (
    language as language,
)
from benchmarks.libraries import (
    optimizers as optimizers,
)
from benchmarks.libraries import (
    science as science,
)
from benchmarks.libraries import (
    vision as vision,
)
