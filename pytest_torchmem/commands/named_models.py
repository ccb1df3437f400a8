"""Models by name, from their configuration alone: no weights are read, and none take memory."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from pytest_torchmem.errors import UsageError

Model = tuple[Any, Any] | tuple[Any, Any, dict[str, Any]]
"""A model on meta and its inputs, the last of them keyword arguments."""


def named_model(written: str, batch: int, sequence: int) -> Callable[[], Model] | None:
    """Return what makes the model that ``hf:NAME``, ``timm:NAME`` or ``torchvision:NAME`` names,
    None where ``written`` is none of these.

    ``batch`` is the number of samples, ``sequence`` of tokens each; pictures are as large as the
    model's configuration says. Raises ``UsageError`` if the library is not installed.
    """
    library, _, name = written.partition(":")
    if library not in _LIBRARIES:
        return None
    package, build = _LIBRARIES[library]
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(f"{written}: {error}. Install it: pip install {package}") from None
    return partial(build, module, name, batch, sequence)


def _of_transformers(transformers: ModuleType, name: str, batch: int, sequence: int) -> Model:
    """Return a model of the hub or a local folder, in the type of its checkpoint."""
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:  # what it says of a name that it does not find
        raise UsageError(f"hf:{name}: {str(error).partition('. ')[0]}") from None
    kind = getattr(transformers, (config.architectures or ("",))[0], None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(config, "dtype", None) or torch.float32)
    try:  # what is float32 whatever the type of the checkpoint, such as frequencies, stays that
        with torch.device("meta"):
            made = (kind or transformers.AutoModel.from_config)(config)
    finally:
        torch.set_default_dtype(before)
    takes = inspect.signature(made.forward).parameters
    if made.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        picture = torch.zeros(batch, config.num_channels, height, width, dtype=made.dtype)
        return made, picture
    if made.main_input_name != "input_ids":
        raise UsageError(
            f"hf:{name} takes {made.main_input_name}: write a function that returns the model and "
            "its inputs, and name that"
        )
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    known = {"input_ids": tokens}
    if "decoder_input_ids" in takes and config.is_encoder_decoder:
        known["decoder_input_ids"] = tokens
    if "labels" in takes and made.get_output_embeddings() is not None:
        known["labels"] = tokens
    return (made, known)


def _of_timm(timm: ModuleType, name: str, batch: int, sequence: int) -> Model:
    import torch

    with torch.device("meta"):
        made = timm.create_model(name)
    return made, torch.zeros(batch, *made.default_cfg["input_size"])


def _of_torchvision(models: ModuleType, name: str, batch: int, sequence: int) -> Model:
    import torch

    transforms = next(iter(models.get_model_weights(name))).transforms()
    if not hasattr(transforms, "crop_size"):
        raise UsageError(
            f"torchvision:{name} is no classifier of pictures: write a function that returns the "
            "model and its inputs, and name that"
        )
    size = transforms.crop_size[0]
    with torch.device("meta"):
        made = models.get_model(name, weights=None)
    return made, torch.zeros(batch, 3, size, size)


_LIBRARIES: dict[str, tuple[str, Callable[..., Model]]] = {
    "hf": ("transformers", _of_transformers),
    "timm": ("timm", _of_timm),
    "torchvision": ("torchvision.models", _of_torchvision),
}
"""The package of each library, and what makes a model of it."""
