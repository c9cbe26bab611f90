"""Hugging Face's Trainer, preemptible.

with spottrain.session() as session:
    trainer = SpottrainTrainer(session=session, model=model, args=TrainingArguments(...), train_dataset=dataset)
    trainer.train()

Any other subclass of Trainer: `class MyTrainer(SpottrainTrainer, SFTTrainer): ...`. The batch is the job's, so that
per_device_train_batch_size and gradient_accumulation_steps are set here, for each world size anew; and so are the
checkpoints, in place of the Trainer's own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from spottrain.failures import UserError
from spottrain.foreign_loop import ForeignLoop
from spottrain.session import Session
from spottrain_api.contract import FailureReason

# What a TrainerState has of the run, beside what follows from the arguments of this generation.
_OF_THE_RUN = ("epoch", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step")
_IGNORED_LABEL = -100
# Arguments for what the job must leave to the Trainer.
_ARGUMENTS = {
    "precision": "bf16 or fp16 in TrainingArguments",
    "activationCheckpointing": "gradient_checkpointing in TrainingArguments",
    "compile": "torch_compile in TrainingArguments",
    "fsdp": "fsdp and fsdp_config in TrainingArguments, with version 2",
    "deepspeed": "not supported under the Trainer",
}


class SpottrainCallback(TrainerCallback):
    """Resumes at the begin of training, and says when a step is complete.

    That is when the data of the next are asked for, so that what the Trainer logs of a step is committed with it;
    but before an evaluation, during which no notice is followed.
    """

    def __init__(self, trainer: SpottrainTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.begin(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        before, state.epoch = self._trainer.epochs(state.global_step - 1), self._trainer.epochs(state.global_step)
        if math.floor(state.epoch) > math.floor(before):
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
            control.should_evaluate |= args.eval_strategy == IntervalStrategy.EPOCH
        if control.should_evaluate:
            self._trainer.loop.complete_step()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.loop.complete_step()


class SpottrainTrainer(Trainer):
    """A transformers.Trainer that stops, commits and resumes as the job wants it. Implements Stateful, for the
    Trainer's own records."""

    loop: ForeignLoop

    def __init__(self, *positional: Any, session: Session, **named: Any) -> None:
        """`session` is of `spottrain.session()`; all else is the Trainer's. Raises UserError."""
        super().__init__(*positional, **named)
        self._session = session
        plan = session.batch_plan
        args = self.args
        if args.load_best_model_at_end or not hasattr(self.train_dataset, "__len__"):
            raise UserError(
                FailureReason.INVALID_CONFIGURATION,
                "SpottrainTrainer needs a train_dataset with a length, and load_best_model_at_end False, as the "
                "checkpoints are the job's; `spottrain checkpoints export` makes a model of one",
            )
        args.per_device_train_batch_size = self._train_batch_size = plan.micro_batch
        args.gradient_accumulation_steps = plan.num_micro_batches
        args.average_tokens_across_devices = True
        args.save_strategy = IntervalStrategy.NO
        if args.max_steps <= 0:
            args.max_steps = math.ceil(args.num_train_epochs * len(self.train_dataset) / plan.global_batch)
        self.add_callback(SpottrainCallback(self))

    def begin(self, state: TrainerState) -> None:
        """Resume; called when model, optimizer and schedule are there."""
        scaler = self.accelerator.scaler
        training = self._session.adopt(
            self.model_wrapped,
            self.optimizer.optimizer,  # accelerate's is around torch's
            scheduler=self.lr_scheduler,
            dataset=self.train_dataset,
            collate=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            num_workers=self.args.dataloader_num_workers,
            stateful={"trainer": self} | ({"scaler": scaler} if scaler is not None else {}),
            instead=_ARGUMENTS,
        )
        self.loop = ForeignLoop(training, state.max_steps)
        self.optimizer.optimizer.register_step_pre_hook(self.loop.before_update)
        state.global_step = self.loop.step
        # What the Trainer divides by where it reports means.
        self._globalstep_last_logged = self._initial_global_step = self.loop.step

    def epochs(self, step: int) -> float:
        """How often the data set was used up to and including a step."""
        return step * self._session.batch_plan.global_batch / len(self.train_dataset)

    def get_train_dataloader(self) -> Iterator[Any]:
        """This rank's share of the run, from the step on from which it resumes; it has no length."""
        for micro_batch, batch in self.loop.micro_batches():
            if micro_batch.num_samples == 0 and "labels" in batch:
                # Of a rank that has no samples left; the Trainer divides by the number of labels.
                batch["labels"] = torch.full_like(batch["labels"], _IGNORED_LABEL)
            yield batch

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's own, weighted so that the gradient is the mean over the global batch."""
        loss = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if return_outputs or not model.training:
            return loss
        if self._divides_by_items(num_items_in_batch):
            self.loop.observe(loss)
            return loss
        return self.loop.weigh(loss)

    def _divides_by_items(self, num_items_in_batch: Any) -> bool:
        """Whether losses are sums divided by the number of labels in the global batch; as training_step has it."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(counted or self.compute_loss_func is not None)

    def state_dict(self) -> dict[str, Any]:
        return {"state": json.dumps(dataclasses.asdict(self.state))}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        saved = json.loads(state_dict["state"])
        for name in _OF_THE_RUN:
            setattr(self.state, name, saved[name])
