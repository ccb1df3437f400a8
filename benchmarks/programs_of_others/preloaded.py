"""What the programs' processes have imported when they begin, to save its time in each of them."""

import importlib
from contextlib import suppress

NAMES = [
    "torch",
    "torch.optim",
    "torch._dynamo",
    "numpy",
    "pytest_torchmem",
    "benchmarks.programs_of_others.one",
    "matplotlib.pyplot",
    "torchvision",
    "pandas",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.trainer",
    "transformers.generation.utils",
    "datasets",
]

for name in NAMES:
    with suppress(Exception):
        importlib.import_module(name)
