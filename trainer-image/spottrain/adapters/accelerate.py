"""Preemptible training with Accelerate.

with spottrain.session() as session:
    accelerator = Accelerator()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loop = AcceleratedLoop(session, accelerator, model, optimizer, dataset, scheduler=scheduler, total=1000)
    for batch in loop.batches():
        with accelerator.accumulate(model):
            accelerator.backward(loop.weigh(loss_of(model, batch)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

The job decides the batch and the checkpoints. The adapter sets the accumulation of gradients for each world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from spottrain.data.items import MapDataset
from spottrain.data.script_order import OrderFunction
from spottrain.data.streams.dataset import Streams
from spottrain.loop.foreign_loop import ForeignLoop
from spottrain.loop.session import Session
from spottrain.world.failures import UserError

# Where Accelerate has the settings that a job cannot make under it.
_ARGUMENTS = {
    "precision": "mixed_precision of Accelerator",
    "activationCheckpointing": "torch.utils.checkpoint in the model",
    "compile": "dynamo_backend of Accelerator",
    "fsdp": "FullyShardedDataParallelPlugin with fsdp_version 2",
    "deepspeed": "only in spottrain's own loop",
}


class AcceleratedLoop(ForeignLoop):
    """The steps of a run, for a script that calls Accelerate. The constructor is a collective that resumes."""

    def __init__(
        self,
        session: Session,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        dataset: MapDataset | Streams,
        *,
        total: int | None = None,
        epochs: int | None = None,
        scheduler: AcceleratedScheduler | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        order: OrderFunction | None = None,
        num_workers: int | None = None,
        loader: Mapping[str, Any] | None = None,
    ) -> None:
        """Resume from the newest commit. Commits also hold the objects of `register_for_checkpointing`.

        Args:
            session: What `spottrain.session()` gave.
            accelerator: The script's accelerator.
            model: As `accelerator.prepare` returned it.
            optimizer: As `accelerator.prepare` returned it.
            dataset: As for `Session.prepare`. Streams and mixtures have no epochs.
            total: Steps of the whole run.
            epochs: Epochs of the whole run: see `epochs`. With `total`, it ends with what comes first.
            scheduler: As `accelerator.prepare` returned it; it steps once an optimizer step.
            collate: Makes a batch from a list of items. None: as torch's DataLoader does.
            shuffle: Read the samples in a random order, a different one in each epoch.
            order: As for `Session.prepare`.
            num_workers: As for `Session.prepare`.
            loader: As for `Session.prepare`.

        Raises:
            UserError: The accelerator has prepared more than what is passed here, which no commit would hold.
        """
        if not isinstance(optimizer, AcceleratedOptimizer) or not isinstance(scheduler, AcceleratedScheduler | None):
            raise UserError(
                "AcceleratedLoop needs model, optimizer and scheduler as accelerator.prepare(...) returns them"
            )
        if more := list(_not_passed(accelerator, model, optimizer, scheduler)):
            raise UserError(
                f"the accelerator has prepared {', '.join(more)} besides what AcceleratedLoop was given, which no "
                "commit would hold; train one model with one optimizer, and pass its scheduler"
            )
        accelerator.gradient_accumulation_steps = session.batch_plan.num_micro_batches
        # Otherwise a step also ends while an accelerator's data loader is at its last batch, as one of a validation
        # stays if a loop over it is left there. Training has no data loader of the accelerator.
        accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
        if scheduler is not None:
            # Otherwise it steps once per rank, or once per micro-batch (`step_scheduler_with_optimizer=False`), and
            # learning rates depend on the number of ranks.
            scheduler.split_batches = scheduler.step_with_optimizer = True
        scaler = accelerator.scaler
        objects = Registered(accelerator, known=(optimizer, scheduler))
        training = session.adopt(
            model,
            optimizer.optimizer,
            scheduler=scheduler.scheduler if scheduler is not None else None,
            dataset=dataset,
            collate=collate,
            shuffle=shuffle,
            order=order,
            num_workers=num_workers,
            loader=loader,
            stateful={"objects": objects},
            records={"scaler": scaler} if scaler is not None else {},
            instead=_ARGUMENTS,
        )
        super().__init__(training, total, epochs=epochs)
        optimizer.optimizer.register_step_pre_hook(self.before_update)

    def batches(self) -> Iterator[Any]:
        """This rank's micro-batches of the remaining steps.

        Yields:
            A batch as `collate` made it, on the rank's device: tensors of shape `(micro, ...)`.

        Raises:
            Drained: The ranks have agreed to stop between two steps. Do not catch it: it ends the script.
        """
        return (batch for _, batch in self.micro_batches())


class Registered:
    """The objects of `register_for_checkpointing`. Implements Stateful."""

    def __init__(self, accelerator: Accelerator, *, known: tuple[Any, ...]) -> None:
        """`known` are objects that commits hold already."""
        self._accelerator = accelerator
        self._known = known
        self._objects = self._registered()

    def _registered(self) -> list[Any]:
        return [each for each in self._accelerator._custom_objects if all(each is not one for one in self._known)]

    def state_dict(self) -> dict[str, Any]:
        if len(self._registered()) != len(self._objects):
            raise UserError(
                "an object was given to register_for_checkpointing after AcceleratedLoop was created, which is when "
                "a run resumes; register it before"
            )
        return {"objects": [each.state_dict() for each in self._objects]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        saved = state_dict["objects"]
        if len(saved) != len(self._objects):
            raise UserError(
                f"the commit holds {len(saved)} objects of register_for_checkpointing, and the accelerator has "
                f"{len(self._objects)}; register the same ones, in the same order"
            )
        for each, state in zip(self._objects, saved, strict=True):
            each.load_state_dict(state)


def _not_passed(accelerator: Accelerator, model: nn.Module, *passed: Any) -> Iterator[str]:
    """What the accelerator has prepared besides what the loop was given."""
    trained = {id(each) for each in model.parameters()}  # the accelerator keeps models as they were before prepare
    prepared = [parameter for each in accelerator._models for parameter in each.parameters()]
    if any(each.requires_grad and id(each) not in trained for each in prepared):
        yield "another model"
    for kind, known in (
        ("another optimizer", accelerator._optimizers),
        ("another scheduler", accelerator._schedulers),
    ):
        if any(all(each is not one for one in passed) for each in known):
            yield kind
