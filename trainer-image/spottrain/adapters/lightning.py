"""Lightning, preemptible.

with spottrain.session() as session:
    strategy = SpottrainStrategy(session, dataset)
    callbacks = [SpottrainCallback(strategy)]
    trainer = Trainer(max_steps=1000, strategy=strategy, callbacks=callbacks, **strategy.placement)
    trainer.fit(module, strategy.batches)

The batch and the checkpoints are the job's: accumulate_grad_batches is set here, for each world size anew. Lightning
sees what is left of the run as one epoch. For modules with automatic optimization and one optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from spottrain import random_state
from spottrain.failures import UserError
from spottrain.foreign_loop import ForeignLoop
from spottrain.loader import MapDataset
from spottrain.session import Session
from spottrain_api.contract import FailureReason

# Where Lightning has what the job must leave to it.
_ARGUMENTS = {
    "precision": 'precision of Lightning\'s Trainer, such as "bf16-mixed"',
    "activationCheckpointing": "torch.utils.checkpoint in the module",
    "compile": "compile() of the module's parts, in its configure_model",
    "fsdp": "SpottrainStrategy is DDP",
    "deepspeed": "SpottrainStrategy is DDP",
}


class SessionEnvironment(ClusterEnvironment):
    """Tells Lightning what the session knows of the ranks, whoever has started them."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return False  # it is passed on purpose

    def world_size(self) -> int:
        return self._session.world_size

    def global_rank(self) -> int:
        return self._session.rank

    def local_rank(self) -> int:
        return self._session.local_rank

    def node_rank(self) -> int:
        return self._session.rank // self.local_world_size

    def set_world_size(self, size: int) -> None:
        """The session has settled it."""

    def set_global_rank(self, rank: int) -> None:
        """The session has settled it."""


class Batches:
    """This rank's share of what is left of the run; what `trainer.fit` takes for its data."""

    def __init__(self, strategy: SpottrainStrategy) -> None:
        self._strategy = strategy

    def __len__(self) -> int:
        loop = self._strategy.loop
        return (loop.total - loop.step) * loop.training.plan.num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self._strategy.loop.micro_batches())


class SpottrainStrategy(DDPStrategy):
    """DDP whose gradients are the mean over the job's global batch, and which resumes when it is set up."""

    loop: ForeignLoop

    def __init__(
        self,
        session: Session,
        dataset: MapDataset,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **ddp: Any,
    ) -> None:
        """`collate` makes a batch of a list of items (default: torch's), `num_workers` processes fetch items ahead;
        `ddp` are arguments of DDPStrategy."""
        self._environment = SessionEnvironment(session)
        super().__init__(cluster_environment=self._environment, **ddp)
        self.session = session
        self._dataset = dataset
        self._collate = collate
        self._num_workers = num_workers
        self.batches = Batches(self)

    @property
    def placement(self) -> dict[str, Any]:
        """Arguments of Trainer that say where the ranks are."""
        devices = self._environment.local_world_size
        accelerator = "gpu" if self.session.device.type == "cuda" else "cpu"
        return {
            "accelerator": accelerator,
            "devices": devices,
            "num_nodes": self.session.world_size // devices,
        }

    def setup(self, trainer: Trainer) -> None:
        """Spread the model and resume. Raises UserError."""
        super().setup(trainer)
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        schedules = self.lr_scheduler_configs
        by_itself = trainer.lightning_module.automatic_optimization
        counted = all(
            (each.interval, each.frequency, each.reduce_on_plateau) == ("step", 1, False) for each in schedules
        )
        if not by_itself or len(self.optimizers) != 1 or not counted or trainer.max_steps < 1:
            raise UserError(
                FailureReason.INVALID_CONFIGURATION,
                "spottrain's strategy for Lightning needs Trainer(max_steps=...), automatic optimization with one "
                'optimizer, and a learning rate schedule, if there is one, with "interval": "step", "frequency": 1 '
                "and no metric, as an epoch is not a unit of the run, and a drain may leave out a validation",
            )
        if stateful := [type(each).__name__ for each in trainer.callbacks if each.state_dict()]:
            raise UserError(
                FailureReason.INVALID_CONFIGURATION,
                f"the commits don't hold the states of callbacks, and {', '.join(stateful)} of Lightning's Trainer "
                "would begin anew after each preemption; leave such callbacks out, and ModelCheckpoint by "
                "enable_checkpointing=False",
            )
        scaler = getattr(self.precision_plugin, "scaler", None)  # of 16-mixed
        training = self.session.adopt(
            self.model,
            self.optimizers[0],
            scheduler=schedules[0].scheduler if schedules else None,
            dataset=self._dataset,
            collate=self._collate,
            num_workers=self._num_workers,
            stateful={"scaler": scaler} if scaler is not None else None,
            instead=_ARGUMENTS,
        )
        self.loop = ForeignLoop(training, trainer.max_steps)
        trainer.accumulate_grad_batches = training.plan.num_micro_batches
        # What trainer.global_step is read from.
        done = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        done.ready = done.completed = self.loop.step

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """With the weight of the micro-batch; Lightning has divided by their number."""
        number = self.loop.training.plan.num_micro_batches
        loss = self.loop.weigh(closure_loss * number) / number
        weighted: torch.Tensor = super().backward(loss, optimizer, *args, **kwargs)
        return weighted


class SpottrainCallback(Callback):
    """Judges each optimizer step, and meets the other ranks at its end, before a validation."""

    def __init__(self, strategy: SpottrainStrategy) -> None:
        self._strategy = strategy
        self._state_of_training: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's handler runs a collective at once, wherever the rank is in its own.
        self._strategy.session.catch_sigterm()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._strategy.loop.before_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._strategy.loop.complete_step()
            if trainer.enable_validation:
                self._state_of_training = random_state.capture()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The random numbers of training don't know of a validation: a drain may leave it out.
        if self._state_of_training is not None:
            random_state.restore(self._state_of_training)
