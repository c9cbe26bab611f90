"""Preemptible training with Lightning.

with spottrain.session() as session:
    strategy = SpottrainStrategy(session, dataset)
    callbacks = [SpottrainCallback(strategy)]
    trainer = Trainer(max_steps=1000, strategy=strategy, callbacks=callbacks, **strategy.placement)
    trainer.fit(module, strategy.batches)

The job decides the batch and the checkpoints. The adapter sets accumulate_grad_batches for each world size. With
max_epochs, an epoch is one of the data, with an exact end. With max_steps, the run is one epoch for Lightning.
val_check_interval counts steps. Modules with manual optimization get each rank's part of a batch at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from spottrain.data import random_state
from spottrain.data.items import MapDataset
from spottrain.data.script_order import OrderFunction
from spottrain.data.streams.dataset import Streams
from spottrain.loop.foreign_loop import ForeignLoop
from spottrain.loop.session import Session
from spottrain.world.failures import UserError

# Where Lightning has the settings that a job cannot make under it.
_ARGUMENTS = {
    "precision": 'precision of Lightning\'s Trainer, such as "bf16-mixed"',
    "activationCheckpointing": "torch.utils.checkpoint in the module",
    "compile": "compile() of the module's parts, in its configure_model",
    "fsdp": "SpottrainStrategy is DDP",
    "deepspeed": "SpottrainStrategy is DDP",
}
# Parts of a checkpoint of Lightning that a commit holds already, or that follow from the step.
_OF_THE_COMMIT = ("epoch", "global_step", "state_dict", "loops", "optimizer_states", "lr_schedulers")
# Attributes with the names under which a checkpoint holds hyper-parameters, which the script decides.
_OF_THE_SCRIPT = (
    "CHECKPOINT_HYPER_PARAMS_KEY",
    "CHECKPOINT_HYPER_PARAMS_NAME",
    "CHECKPOINT_HYPER_PARAMS_TYPE",
)


class SessionEnvironment(ClusterEnvironment):
    """Gives Lightning the session's ranks, whoever has started them."""

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
        return False  # it is only used if it is passed

    def world_size(self) -> int:
        return self._session.world_size

    def global_rank(self) -> int:
        return self._session.rank

    def local_rank(self) -> int:
        return self._session.local_rank

    def node_rank(self) -> int:
        return self._session.rank // self.local_world_size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the session decides it."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the session decides it."""


class Batches:
    """The data for `trainer.fit`: this rank's share of the run. It starts at the step at which the run resumes."""

    def __init__(self, strategy: SpottrainStrategy) -> None:
        self._strategy = strategy

    def __len__(self) -> int:
        return self._strategy.steps_of_epoch * self._strategy.num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        trainer = self._strategy.lightning_module.trainer
        left = self._strategy.begin_epoch(trainer)  # when the first batch is requested
        if not trainer.should_stop:
            yield from left


class Records:
    """Contents of Lightning's checkpoints that a commit does not hold otherwise.

    These are the states of callbacks, of a data module and of the loss scaler, and additions of the module's hooks.
    Implements Stateful.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._connector = trainer._checkpoint_connector

    def state_dict(self) -> dict[str, Any]:
        module, data = self._trainer.lightning_module, self._trainer.datamodule
        checkpoint = self._connector.dump_checkpoint(weights_only=False)
        weights = {name: _address(value) for name, value in module.state_dict().items()}
        if any(_address(value) != weights.get(name) for name, value in checkpoint["state_dict"].items()):
            raise UserError(
                "a hook on_save_checkpoint (of the module, or of a callback such as WeightAveraging) replaces the "
                "weights in training, and would lose its own at a preemption; leave it out"
            )
        ours = {*_OF_THE_COMMIT, *(getattr(each, key) for each in (module, data) if each for key in _OF_THE_SCRIPT)}
        records = {key: value for key, value in checkpoint.items() if key not in ours}
        steps = self._trainer.global_step  # of all optimizers
        return {"checkpoint": records, "should_stop": bool(self._trainer.should_stop), "optimizer_steps": steps}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        connector, module = self._connector, self._trainer.lightning_module
        self._trainer.should_stop = state_dict["should_stop"]
        loop = self._trainer.fit_loop.epoch_loop  # trainer.global_step is read from it
        done: Any = loop.manual_optimization.optim_step_progress.total
        if module.automatic_optimization:
            done = loop.automatic_optimization.optim_progress.optimizer.step.total
        done.ready = done.completed = state_dict["optimizer_steps"]
        connector._loaded_checkpoint = {**state_dict["checkpoint"], "state_dict": module.state_dict()}
        connector.restore_datamodule()
        connector.restore_model()  # the hook on_load_checkpoint; the weights are there
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector._loaded_checkpoint = {}


class SpottrainStrategy(DDPStrategy):
    """DDP with gradients that are the mean over the job's global batch. It resumes in its setup."""

    loop: ForeignLoop

    def __init__(
        self,
        session: Session,
        dataset: MapDataset | Streams,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        order: OrderFunction | None = None,
        num_workers: int | None = None,
        loader: Mapping[str, Any] | None = None,
        **ddp: Any,
    ) -> None:
        """Pass `batches` to `trainer.fit`, and `placement` to the Trainer.

        Args:
            session: What `spottrain.session()` gave.
            dataset: As for `Session.prepare`.
            collate: Makes a batch from a list of items. None: as torch's DataLoader does.
            shuffle: Read the samples in a random order, a different one in each epoch.
            order: As for `Session.prepare`.
            num_workers: As for `Session.prepare`.
            loader: As for `Session.prepare`.
            ddp: Further arguments of DDPStrategy.
        """
        self._environment = SessionEnvironment(session)
        super().__init__(cluster_environment=self._environment, **ddp)
        self.session = session
        self._data: dict[str, Any] = {
            "dataset": dataset,
            "collate": collate,
            "shuffle": shuffle,
            "order": order,
            "num_workers": num_workers,
            "loader": loader,
        }
        self.batches = Batches(self)
        self._is_resuming = False

    @property
    def placement(self) -> dict[str, Any]:
        """Trainer's arguments for the ranks: accelerator, devices and num_nodes."""
        devices = self._environment.local_world_size
        accelerator = "gpu" if self.session.device.type == "cuda" else "cpu"
        return {
            "accelerator": accelerator,
            "devices": devices,
            "num_nodes": self.session.world_size // devices,
        }

    @property
    def num_micro_batches(self) -> int:
        """Of each step: one, if the module optimizes by hand."""
        is_automatic = self.lightning_module.automatic_optimization
        return self.session.batch_plan.num_micro_batches if is_automatic else 1

    @property
    def steps_of_epoch(self) -> int:
        """Steps of what Lightning takes for an epoch, from its start."""
        total: int = self.lightning_module.trainer.max_steps
        if total > 0:
            return total
        if not hasattr(self, "loop"):  # while the optimizers are made
            return math.ceil(len(self._data["dataset"]) / self.session.batch_plan.global_batch)
        return len(self.loop.epoch) if self.loop.epoch is not None else 0

    def setup(self, trainer: Trainer) -> None:
        """Spread the model and resume. Raises UserError."""
        is_by_hand = not trainer.lightning_module.automatic_optimization
        if trainer.state.fn is TrainerFn.FITTING and not is_by_hand:
            trainer.accumulate_grad_batches = self.num_micro_batches
        super().setup(trainer)
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        refusals = _refusals(trainer, len(self.optimizers), is_judged=self.session.config.stability is not None)
        if (refusal := next(refusals, None)) is not None:
            raise UserError(f"spottrain's strategy for Lightning {refusal}")
        # A callback that comes earlier may have counted a validation that a drain postpones.
        trainer.callbacks.sort(key=lambda each: not isinstance(each, SpottrainCallback))
        training = self.session.adopt(
            self.model,
            self.optimizers,
            scheduler=[each.scheduler for each in self.lr_scheduler_configs],
            accumulates=not is_by_hand,
            **self._data,
            records={"lightning": Records(trainer)},
            instead=_ARGUMENTS,
        )
        total = trainer.max_steps if trainer.max_steps > 0 else None
        epochs = trainer.max_epochs if total is None else None
        self.loop = loop = ForeignLoop(training, total, epochs=epochs, by_hand=is_by_hand)
        whole = (batch for _, batch in loop.micro_batches())
        self._epochs: Iterator[Iterable[Any]] = loop.epochs() if total is None else iter([whole])
        interval = trainer.val_check_interval
        if isinstance(interval, float) and interval != 1.0:  # a share of the epoch; 1.0 means at its end
            interval = max(1, int(interval * self.steps_of_epoch))
        if isinstance(interval, int):
            trainer.val_check_interval = interval * self.num_micro_batches

    def resume(self, trainer: Trainer) -> None:
        """Make Lightning count from the completed steps, when it is about to begin its first epoch here."""
        if self.loop.step == 0:
            return
        fit, epoch = trainer.fit_loop, self.loop.epoch
        number = epoch.number if epoch is not None else 0
        for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
            progress.ready = progress.started = number + 1
            progress.processed = progress.completed = number
        fit._restart_stage = RestartStage.RESTARTED_MID_EPOCH  # the hook on_train_epoch_start has been called
        self._is_resuming = True

    def begin_epoch(self, trainer: Trainer) -> Iterator[Any]:
        """Begin an epoch, or the rest of one. Returns its batches.

        Commits are made before a validation, so that of the last completed step may not have run yet.
        """
        left = iter(next(self._epochs))
        trainer.fit_loop.max_batches = len(self.batches)
        if self._is_resuming:
            self._is_resuming = False
            self._catch_up(trainer)
        return left

    def _catch_up(self, trainer: Trainer) -> None:
        """Count the batches before a resume, and run a validation that is due."""
        fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        first_step = self.loop.epoch.first_step if self.loop.epoch is not None else 0
        fit._data_fetcher.fetched = (self.loop.step - first_step) * self.num_micro_batches
        loop.batch_progress.increment_by(fit._data_fetcher.fetched)
        loop.batch_progress.total.increment_by(first_step * self.num_micro_batches)
        loop._batches_that_stepped = self.loop.step  # what loggers take for the step
        if not trainer.should_stop and loop._should_check_val_fx(fit._data_fetcher):
            state = random_state.capture()
            trainer.validating = True
            loop.val_loop.run()
            trainer.training = True
            random_state.restore(state)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Weight the loss by its micro-batch. Lightning has divided it by their number."""
        number = self.num_micro_batches
        loss = self.loop.weigh(closure_loss * number) / number
        weighted: torch.Tensor = super().backward(loss, optimizer, *args, **kwargs)
        return weighted


class SpottrainCallback(Callback):
    """Judges each optimizer step.

    It completes a step before a validation and at the end. Ranks cannot follow a notice during a validation. Other
    steps are complete when the next data are requested, after all hooks of the step.
    """

    def __init__(self, strategy: SpottrainStrategy) -> None:
        self._strategy = strategy
        self._state_of_training: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's handler runs a collective at once, even if the rank is inside another one.
        self._strategy.session.catch_sigterm()
        self._strategy.resume(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.loop.complete_step()  # what follows an epoch's steps is done again after a drain here

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._strategy.loop.before_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.enable_validation and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._state_of_training = random_state.capture()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn is TrainerFn.FITTING:
            self._leave_validation()  # its data loader has drawn a random number
            self._strategy.loop.complete_step(pauses=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_validation()

    def _leave_validation(self) -> None:
        """Restore the random numbers of training after a validation.

        A drain may postpone a validation, so a validation must not change them.
        """
        if self._state_of_training is not None:
            random_state.restore(self._state_of_training)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.loop.complete_step()
        self._state_of_training = None


def _refusals(trainer: Trainer, num_optimizers: int, *, is_judged: bool = False) -> Iterator[str]:
    """What the strategy can't follow; the end of a sentence for each cause."""
    is_automatic = trainer.lightning_module.automatic_optimization
    if trainer.max_steps < 1 and (trainer.max_epochs or 0) < 1:
        yield "needs the length of the run; pass Trainer(max_epochs=...) or Trainer(max_steps=...)"
    if not is_automatic and trainer.max_steps > 0:
        yield (
            "needs max_epochs for a module with manual optimization, because max_steps counts the steps of each "
            "optimizer; pass Trainer(max_epochs=...)"
        )
    if not is_automatic and is_judged:
        yield (
            "needs automatic optimization if the job has stability, which judges a step by its one loss; leave out "
            "one of them"
        )
    if is_automatic and num_optimizers != 1:
        yield (
            f"needs one optimizer, and configure_optimizers returns {num_optimizers}; return one, with a group of "
            "parameters for each part of the module, or set automatic_optimization = False and step each"
        )
    for name in ("limit_train_batches", "overfit_batches"):
        if getattr(trainer, name) != {"limit_train_batches": 1.0, "overfit_batches": 0}[name]:
            yield f"needs the Trainer without {name}: the job decides the data of a run; set max_steps instead"
    interval = "epoch" if trainer.max_steps < 1 else "step"
    for each in trainer.strategy.lr_scheduler_configs:
        if each.reduce_on_plateau:
            yield (
                "needs a schedule that follows no metric, because a drain may postpone the validation that computes "
                f"it; replace {type(each.scheduler).__name__} by a schedule of steps"
            )
        elif is_automatic and (each.interval not in ("step", interval) or each.frequency != 1):
            yield (
                f'needs a schedule with "interval": "{interval}" and "frequency": 1, and configure_optimizers '
                f'returns "interval": "{each.interval}" and "frequency": {each.frequency}; count the schedule in '
                f"{interval}s"
            )


def _address(value: Any) -> Any:
    """The address of a tensor's memory; other values as they are."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
