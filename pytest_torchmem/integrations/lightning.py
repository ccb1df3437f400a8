"""A callback for the Trainer of Lightning."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from pytest_torchmem.integrations.training import RunPeaks, loss_of, sentence


class MemoryCallback(Callback):
    """Writes the traced and the real peak of a training to the loggers at its end.

    ``figures`` has them in bytes. What is traced is ``training_step``, the backward and the
    optimizer with the largest batch.
    """

    def __init__(self) -> None:
        self.figures: dict[str, int] = {}
        self._peaks = RunPeaks()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peaks.begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._peaks.see(batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = next(iter(trainer.optimizers), None)
        self.figures = self._peaks.compare(_Loss(pl_module, trainer), optimizer)
        if self.figures:
            for logger in trainer.loggers:
                logger.log_metrics(self.figures, step=trainer.global_step)
            rank_zero_info(sentence(self.figures))


class _Loss(nn.Module):
    """The loss of a training step, which logs nothing meanwhile."""

    def __init__(self, module: LightningModule, trainer: Trainer) -> None:
        super().__init__()
        self.module, self._context = module, trainer.precision_plugin.forward_context

    def forward(self, batch: Any) -> Any:
        own = vars(self.module)
        own["log"] = lambda *_, **__: None
        try:
            with self._context():
                return loss_of(self.module.training_step(batch, 0))
        finally:
            del own["log"]
