"""A callback for the Trainer of transformers."""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from pytest_torchmem.integrations.training import RunPeaks, loss_of, sentence


class MemoryCallback(TrainerCallback):
    """Prints the traced and the real peak of a training at its end.

    ``figures`` has them in bytes, and so has ``trainer.state.log_history``. What is traced is the
    forward, the backward and the optimizer with the largest batch that the model was given.
    """

    def __init__(self) -> None:
        self.figures: dict[str, int] = {}
        self._peaks = RunPeaks()
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._peaks.begin()
        self._hook = more["model"].register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            self._peaks.see(*args, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._hook.remove()
        self.figures = self._peaks.compare(_Loss(more["model"]), more["optimizer"])
        if self.figures and state.is_world_process_zero:
            state.log_history.append({**self.figures, "step": state.global_step})
            print(sentence(self.figures))


class _Loss(nn.Module):
    """The loss of a model alone: the Trainer, too, drops the other outputs before the backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return loss_of(self.model(*args, **kwargs))
