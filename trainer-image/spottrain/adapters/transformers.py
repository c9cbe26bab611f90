"""Preemptible training with Hugging Face's Trainer.

with spottrain.session() as session:
    trainer = SpottrainTrainer(session=session, model=model, args=TrainingArguments(...), train_dataset=dataset)
    trainer.train()

For a subclass of Trainer: `class MyTrainer(SpottrainTrainer, SFTTrainer): ...`. The job decides the batch: the
adapter sets per_device_train_batch_size and gradient_accumulation_steps for each world size. The job's checkpoints
replace the Trainer's own. An epoch is one of the data, with an exact end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.data_loader import get_sampler
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.optimization import GreedyLR
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, TrainOutput

from spottrain.adapters.samplers import ordering
from spottrain.data import Mixture, Streams, random_state
from spottrain.loop.acceptance import check_dataset
from spottrain.loop.epoch import Epoch
from spottrain.loop.foreign_loop import ForeignLoop
from spottrain.loop.session import Session
from spottrain.recovery.script_parts import Stateful
from spottrain.world.failures import UserError

# Fields of TrainerState that belong to the run. The others follow from the arguments of this generation.
_OF_THE_RUN = ("epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")
# Sampling strategies that the job can follow.
_STRATEGIES = ("random", "sequential", "group_by_length")
# Methods by which a subclass makes batches of its own, which would differ for every world size.
_LOADERS = ("get_train_dataloader", "_get_dataloader")
# Where the Trainer has the settings that a job cannot make under it.
_ARGUMENTS = {
    "precision": "bf16 or fp16 in TrainingArguments",
    "activationCheckpointing": "gradient_checkpointing in TrainingArguments",
    "compile": "torch_compile in TrainingArguments",
    "fsdp": "fsdp and fsdp_config in TrainingArguments, with version 2",
    "deepspeed": "not supported under the Trainer",
}


class SpottrainCallback(TrainerCallback):
    """Resumes at the start of training, and says where in its epoch a step is. Comes before other callbacks."""

    def __init__(self, trainer: SpottrainTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.begin(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        number, steps = divmod(state.global_step, self._trainer.steps_per_epoch)
        state.epoch = number + steps / self._trainer.steps_per_epoch
        if self._trainer.ends_epoch:  # before the step is complete, so that its commit holds the entry
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.loop.complete_step()


class Batches:
    """The data for the Trainer: this rank's micro-batches of the epoch under way, or of what is left of it."""

    def __init__(self, trainer: SpottrainTrainer) -> None:
        self._trainer = trainer
        self.dataset = trainer.train_dataset  # the Trainer counts its samples

    def __len__(self) -> int:
        """Of a whole epoch."""
        num_micro_batches: int = self._trainer.args.gradient_accumulation_steps
        return self._trainer.steps_per_epoch * num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._trainer.epoch)


class SpottrainTrainer(Trainer):
    """A transformers.Trainer that stops, commits and resumes with the job.

    A step is complete when the data of the next step are requested, so that a commit holds what the Trainer logs
    about its step. Before an evaluation, and before all that follows the steps of an epoch, it is completed at once.

    Implements Stateful, for the Trainer's own records.

    Attributes:
        loop: The steps of the run, once it has begun.
        epoch: The epoch under way.
    """

    loop: ForeignLoop
    epoch: Epoch[Any]
    control: TrainerControl
    compute_loss: Callable[..., Any]

    def __init__(self, *positional: Any, session: Session, **named: Any) -> None:
        """Take the Trainer's arguments.

        Args:
            positional: Positional arguments of the Trainer.
            session: What `spottrain.session()` gave.
            named: Keyword arguments of the Trainer.

        Raises:
            UserError: The arguments set what the job decides, such as the batch.
        """
        super().__init__(*positional, **named)
        self._session = session
        plan = session.batch_plan
        args = self.args
        if args.load_best_model_at_end:
            raise UserError(
                "SpottrainTrainer needs load_best_model_at_end False, because the checkpoints are the job's; "
                "`spottrain checkpoints export` makes a model from one"
            )
        if args.auto_find_batch_size or args.train_sampling_strategy not in _STRATEGIES:
            raise UserError(
                "SpottrainTrainer needs auto_find_batch_size False, and for train_sampling_strategy one of "
                f"{', '.join(_STRATEGIES)}, because the job decides batches and the order of the samples for every "
                "world size; set batch.micro in the job"
            )
        check_dataset(self.train_dataset)
        self._has_epochs = not isinstance(self.train_dataset, Mixture | Streams)
        if not self._has_epochs:
            self._check_endless()
        self._refuse_other_arguments()
        args.per_device_train_batch_size = self._train_batch_size = plan.micro_batch
        args.gradient_accumulation_steps = plan.num_micro_batches
        args.average_tokens_across_devices = False  # the weights of the micro-batches do that
        args.save_strategy = IntervalStrategy.NO
        self._weights: deque[tuple[Any, Any]] = deque()
        self._is_surplus = False  # whether the newest micro-batch weighs nothing
        self._is_evaluating = False  # then a commit is made before the evaluation, which a resume then runs
        self._num_ended = 0  # epochs of which all is done that follows their steps
        self.compute_loss = self._weighed(self.compute_loss)  # also if a subclass overrides it
        self.callback_handler.callbacks.insert(0, SpottrainCallback(self))

    def _check_endless(self) -> None:
        """Check that the arguments fit data without epochs, which have an order of their own. Raises UserError."""
        args, kind = self.args, type(self.train_dataset).__name__
        if args.max_steps <= 0:
            raise UserError(
                f"train_dataset ({kind}) has no epochs, as each of its parts begins again when it ends; set "
                "max_steps in TrainingArguments"
            )
        sampling = next(each for each in type(self).__mro__ if "_get_train_sampler" in vars(each))
        if args.train_sampling_strategy == "group_by_length" or sampling is not Trainer:
            asked = "group_by_length" if sampling is Trainer else f"_get_train_sampler of {sampling.__name__}"
            raise UserError(
                f"train_dataset ({kind}) has an order of its own, so that {asked} can't be followed; leave it out, "
                "and set train_sampling_strategy to random or sequential"
            )

    def _refuse_other_order(self) -> None:
        """Refuse an order of samples that a subclass brings. Raises UserError.

        Its methods are called, as they may only log and call those of the Trainer.
        """
        own = (SpottrainTrainer, Trainer)
        brought = [(kind, name) for kind in type(self).__mro__ for name in _LOADERS if name in vars(kind)]
        foreign = [(kind.__name__, name) for kind, name in brought if kind not in own]
        if foreign and not self._has_own_order():
            kind, name = foreign[0]
            raise UserError(
                f"{kind} brings an order of samples of its own ({name}), and SpottrainTrainer needs one that is "
                "the same at every world size and after a resume. Put the order into train_dataset, one item per use "
                "of a sample, and set train_sampling_strategy to sequential"
            )

    def _whole_sampler(self) -> Any:
        """The Trainer's sampler, as it is for one rank that computes the whole batch at once."""
        args = self.args
        own = args.per_device_train_batch_size, args.gradient_accumulation_steps
        args.per_device_train_batch_size, args.gradient_accumulation_steps = self._session.batch_plan.global_batch, 1
        try:
            return self._get_train_sampler()
        finally:
            args.per_device_train_batch_size, args.gradient_accumulation_steps = own

    def _ordering(self) -> dict[str, Any]:
        """The order of the samples, as arguments of `Session.adopt`. Raises UserError."""
        if not self._has_epochs:
            return {"shuffle": self.args.train_sampling_strategy == "random"}
        return ordering(self._whole_sampler(), len(self.train_dataset), type(self).__name__)

    def _has_own_order(self) -> bool:
        """Whether a subclass's methods give the data set and the loader that the Trainer's give."""
        if not self._has_epochs:  # torch has no loader of them to compare with
            return False
        try:
            ours = self.get_train_dataloader()  # has not begun
        except AttributeError:  # it reads the data, which there are in training alone
            return False
        if type(ours) is not Batches:
            return False
        loaders = self.accelerator._dataloaders
        num_known = len(loaders)
        theirs = super().get_train_dataloader()
        plain = Trainer._get_dataloader(
            self,
            self.train_dataset,
            "Training",
            self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )
        del loaders[num_known:]  # the accelerator notes those that it prepares
        return _order_of(theirs) == _order_of(plain)

    def _refuse_other_arguments(self) -> None:
        """Refuse arguments that ask for an order of samples that is not the job's. Raises UserError."""
        args = self.args
        accelerator = args.accelerator_config
        unapplied = {
            "dataloader_drop_last": args.dataloader_drop_last,
            "data_seed": args.data_seed is not None,
            "dataloader_in_order=False": not args.dataloader_in_order,
            "accelerator_config.split_batches": accelerator.split_batches,
            "accelerator_config.dispatch_batches": accelerator.dispatch_batches,
        }
        asked = [name for name, is_set in unapplied.items() if is_set]
        if asked:
            raise UserError(
                f"{', '.join(asked)} of TrainingArguments can't be followed: batches and the order of the samples "
                "are the job's (batch, seed), and an epoch has all of them; leave it out"
            )

    def _loader(self) -> dict[str, Any]:
        """The arguments for DataLoader, without those that are left to torch."""
        args = self.args
        given = {
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "pin_memory": None if args.dataloader_pin_memory else False,
        }
        return {name: value for name, value in given.items() if value is not None}

    def begin(self, state: TrainerState) -> None:
        """Resume; called when the Trainer has created model, optimizer and schedule."""
        if isinstance(self.lr_scheduler, ReduceLROnPlateau | GreedyLR):
            raise UserError(
                "a learning rate that follows evaluations (reduce_lr_on_plateau, greedy) depends on when the job is "
                "preempted, because a drain postpones the evaluation of its step; use a schedule of steps"
            )
        scaler = self.accelerator.scaler
        training = self._session.adopt(
            self.model_wrapped,
            self.optimizer.optimizer,  # torch's, which accelerate wraps
            scheduler=self.lr_scheduler,
            dataset=self.train_dataset,
            collate=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            **self._ordering(),
            num_workers=self.args.dataloader_num_workers,
            loader=self._loader(),
            records=self._records() | ({"scaler": scaler} if scaler is not None else {}),
            instead=_ARGUMENTS,
        )
        self.loop = loop = ForeignLoop(
            training, state.max_steps, epochs=state.num_train_epochs if self._has_epochs else None
        )
        whole = Epoch(0, range(state.max_steps), (batch for _, batch in loop.micro_batches()))
        self._epochs = loop.epochs() if self._has_epochs else iter([whole])
        self.optimizer.optimizer.register_step_pre_hook(self.loop.before_update)
        state.global_step = self.loop.step
        # What the Trainer reports as means and speeds is counted from here.
        self._globalstep_last_logged = self._initial_global_step = self.loop.step
        self._initial_num_input_tokens_seen = state.num_input_tokens_seen
        if self.loop.step > 0:
            self.args.eval_on_start = False

    @property
    def steps_per_epoch(self) -> int:
        """The last of them has what is left of the data set. Without epochs, the run is one."""
        if not self._has_epochs:
            return int(self.args.max_steps)
        return math.ceil(len(self.train_dataset) / self._session.batch_plan.global_batch)

    @property
    def ends_epoch(self) -> bool:
        """Whether the step that was updated is the last one of its epoch or of the run."""
        return bool(self.state.global_step == self.epoch.first_step + len(self.epoch))

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **named: Any) -> TrainOutput:
        """As the Trainer's, but it resumes from the job's newest commit."""
        if resume_from_checkpoint:
            raise UserError(
                "SpottrainTrainer resumes from the job's newest commit by itself; leave out resume_from_checkpoint"
            )
        self._refuse_other_order()
        return super().train(None, *positional, **named)

    def evaluate(self, *positional: Any, **named: Any) -> dict[str, float]:
        """As the Trainer's, after the step is complete.

        It does not change the random numbers of training: a drain may postpone it to the start of the next
        generation.
        """
        if self.is_in_train:
            self._is_evaluating = True
            self.loop.complete_step(pauses=True)
        state = random_state.capture()
        try:
            metrics: dict[str, float] = super().evaluate(*positional, **named)
            return metrics
        finally:
            random_state.restore(state)
            self._is_evaluating = False

    def get_train_dataloader(self) -> Batches:
        """This rank's share of the run, from the step at which it resumes."""
        return Batches(self)

    def _run_epoch(self, **named: Any) -> None:
        """As the Trainer's, for the epoch that the run has reached, whatever the Trainer takes for its number."""
        if self._is_evaluating:  # the commit was made before the evaluation of its step
            metrics = self._evaluate(named["trial"], named["ignore_keys_for_eval"])
            self._determine_best_metric(metrics, named["trial"])
        under_way = next(self._epochs, None)
        if under_way is None:  # the run has made more epochs already
            self.control.should_training_stop = True
            return
        self.epoch = under_way
        left = under_way.first_step + len(under_way) - self.loop.step
        if left > 0 and not self.control.should_training_stop:
            super()._run_epoch(**named | {"epoch": under_way.number, "num_update_steps_per_epoch": left})
        elif self._num_ended <= under_way.number:
            # Its steps were made before a resume. What the Trainer does after them:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            arguments = (named[name] for name in ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time"))
            self._maybe_log_save_evaluate(self._tr_loss, None, *arguments)
        self._num_ended = under_way.number + 1
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps

    def _maybe_log_save_evaluate(self, *positional: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*positional, **named)
        if self.ends_epoch or self.control.should_training_stop:
            self.loop.complete_step(pauses=True)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, for which this computes the weights.

        Weights count labels if the Trainer does so, as for models that take `num_items_in_batch`. Otherwise they
        count samples.
        """
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        weights = torch.tensor([part.loss_weight for part in self.loop.fetched], device=device)
        counts: Any = [None] * len(batches)
        if num_items is not None:
            counts = torch.stack([self._get_num_items_in_batch([batch], device) for batch in batches]).to(device)
            counted = torch.where(weights > 0, counts, 0)  # a rank without samples left computes one of another rank
            total = self.accelerator.gather(counted.sum()).sum().clamp(min=1)
            weights = counted * self.loop.training.plan.world_size / total
            counts = counts.clamp(min=1)
        self._weights = deque(zip(weights, counts, strict=True))
        return batches, num_items

    def _weighed(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Weight the losses of training by their share of the global batch.

        The gradient is then the mean over that batch. A loss is the mean over a micro-batch, whether the model
        divides by `num_items_in_batch` or takes a mean itself.
        """

        def weighed(
            model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **named: Any
        ) -> Any:
            if not model.training:
                return compute_loss(
                    model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **named
                )
            weight, num_items = self._weights.popleft()
            self.current_gradient_accumulation_steps = 1  # the Trainer divides by it; the weight includes it
            loss = compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items, **named)
            loss, *outputs = loss if return_outputs else (loss,)
            loss = torch.where(weight > 0, loss * weight, 0.0)  # a mean over no labels is NaN
            self._is_surplus = self.loop.fetched[0].num_samples == 0
            self.loop.observe(loss)
            return (loss, *outputs) if return_outputs else loss

        return weighed

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The job's global batch, without micro-batches that weigh nothing."""
        return self._session.batch_plan.global_batch

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the Trainer's; 0 for a micro-batch that weighs nothing."""
        return 0 if self._is_surplus else super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        if self._is_surplus:  # the count is a collective, in which this rank then has no tokens
            inputs = {
                name: each[:0] for name, each in inputs.items() if isinstance(each, torch.Tensor) and each.dim()
            }
        super()._track_num_input_tokens(inputs)

    def state_dict(self) -> dict[str, Any]:
        records = {name: getattr(self.state, name) for name in (*_OF_THE_RUN, "global_step", "max_steps")}
        return {
            **records,
            "should_stop": bool(self.control.should_training_stop),
            "is_evaluating": self._is_evaluating,
            "num_ended": self._num_ended,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        for name in _OF_THE_RUN:
            setattr(self.state, name, state_dict[name])
        # The Trainer also sets it at the end of the run, which is no end if this run is longer.
        stopped_early = state_dict["global_step"] < state_dict["max_steps"]
        self.control.should_training_stop = stopped_early and state_dict["should_stop"]
        self._is_evaluating = state_dict["is_evaluating"]
        self._num_ended = state_dict["num_ended"]

    def _records(self) -> dict[str, Stateful]:
        """What commits hold of the Trainer: its counts, its log, and each callback that has a state.

        They are parts of their own: what can't be stored of one costs no other.
        """
        found: dict[str, Stateful] = {"trainer": self, "log": Log(self)}
        for each in self.callback_handler.callbacks:
            if isinstance(each, ExportableState):  # such as EarlyStoppingCallback, for its patience
                kind = f"callback {type(each).__name__}"
                found[f"{kind} {sum(name.startswith(f'{kind} ') for name in found)}"] = CallbackState(each)
        return found


def _order_of(loader: Any) -> tuple[Any, ...]:
    """What decides the order in which a data loader gives the samples, to compare it with another one's."""
    if not isinstance(loader, DataLoader):
        return (loader,)
    sampler = get_sampler(loader)
    own = getattr(sampler, "__dict__", {})  # a list has none
    settings = {name: value for name, value in own.items() if name not in ("data_source", "generator")}
    source = getattr(sampler, "data_source", None)
    dataset: Any = loader.dataset
    return type(loader), type(dataset), len(dataset), type(sampler), type(source), settings


class Log:
    """What the Trainer has logged. Implements Stateful."""

    def __init__(self, trainer: SpottrainTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"history": self._trainer.state.log_history}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._trainer.state.log_history = state_dict["history"]


class CallbackState:
    """The attributes of a callback. Implements Stateful."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, Any]:
        attributes: dict[str, Any] = self._callback.state()["attributes"]
        return attributes

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        vars(self._callback).update(state_dict)
