"""One rank's session, which takes the model and the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spottrain.data.batch import BatchPlan
from spottrain.data.items import MapDataset
from spottrain.data.loader import Collate, Data
from spottrain.data.own_data import OwnData
from spottrain.data.rank_data import RankData
from spottrain.data.script_order import OrderFunction
from spottrain.data.streams.dataset import Streams
from spottrain.engines.auto import applied
from spottrain.engines.choice import choose_engine, spread_alone
from spottrain.engines.engine import MakeOptimizer
from spottrain.engines.inside import inside
from spottrain.engines.named_state import MODEL, OPTIMIZER
from spottrain.engines.precision import slower_than_needed
from spottrain.engines.structure import check_same_model
from spottrain.loop.acceptance import (
    check_adopted_model,
    check_length,
    check_model,
    check_optimizer,
    check_scheduler,
    check_scheduler_interval,
    check_stateful,
    checked_optimizer,
    checked_scheduler,
    order_of,
)
from spottrain.loop.assembly import Assembly, numbered
from spottrain.loop.attachment import Attachment
from spottrain.loop.build import BUILD, Built, build
from spottrain.loop.joined import Joined
from spottrain.loop.run import Run
from spottrain.loop.strategy import choose_strategy
from spottrain.loop.training import Training
from spottrain.recovery.peft_adapters import peft_adapters
from spottrain.recovery.script_parts import Stateful
from spottrain.recovery.training_state import SCHEDULER, model_config
from spottrain.world.failures import UserError, as_user_errors
from spottrain.world.launch import Launch
from spottrain.world.progress import ProgressReporter
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.reports import OutcomeKind
from spottrain_api.settings.choices import Strategy

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


class Session:
    """One rank of one generation; `session()` creates it.

    Attributes:
        rank: Number of this rank in the world, from 0.
        local_rank: Number of this rank on its node, from 0.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this node.
        device: Device on which this rank trains.
    """

    def __init__(self, launch: Launch, config: TrainerConfig, reporter: ProgressReporter) -> None:
        """Join the world. Raises UserError if the configuration or the checkpoint store is unusable, or Drained."""
        self.rank = launch.rank
        self.local_rank = launch.local_rank
        self.world_size = launch.world_size
        self.local_world_size = launch.local_world_size
        self.device = launch.device
        self._joined = Joined.join(launch, config, reporter)
        self._context = self._joined.context
        self.config = self._joined.store.config
        self._training: Training | None = None
        self._built: Built | None = None

    def build(self, make: Callable[[], Model]) -> Model:
        """Build the model by `make`, without its first values if a commit is going to replace them.

        That makes restarts of large models faster: to draw weights takes longer than to load them. On a resume, the
        weights are NaN until the loop starts, and random numbers afterwards are as after a usual build. If `make`
        draws random numbers for anything but tensors of the model that a commit holds, the model is built as usual.

        Args:
            make: Builds the whole model. It is called on all ranks alike, and perhaps twice.

        Returns:
            What `make` returned, for `prepare`.

        Example:
            >>> import spottrain, torch
            >>> with spottrain.session(global_batch=4) as session:
            ...     model = session.build(lambda: torch.nn.Linear(3, 1))
            ...     model.weight.shape
            torch.Size([1, 3])
        """
        store = self._joined.store
        saved = None
        if store.newest is not None and store.checkpointer is not None:
            saved = (store.newest_extra or store.checkpointer.newest_extra()).get(BUILD)
        self._built = build(make, saved)
        return cast(Model, self._built.model)

    def prepare(
        self,
        model: nn.Module,
        *,
        optimizer: MakeOptimizer,
        dataset: MapDataset | Streams,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        wrap: Collection[type[nn.Module]] | None = None,
        collate: Collate | None = None,
        shuffle: bool = True,
        order: OrderFunction | None = None,
        scheduler_interval: str = "step",
        clip_grad_norm: float | None = None,
        tokens_per_sample: int | None = None,
        num_workers: int | None = None,
        loader: Mapping[str, Any] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        deepspeed_config: Mapping[str, Any] | str | Path | None = None,
    ) -> Training:
        """Spread `model` over the ranks, and prepare its training.

        A collective: every rank calls it once, with the same model.

        Args:
            model: The whole model, on the CPU or on the session's device.
            optimizer: Called with the spread model; returns its optimizer.
            dataset: The training data: anything with a length and items by index, or `spottrain.data.Streams`.
            scheduler: Called with the optimizer; returns a schedule that steps once a `scheduler_interval`.
            wrap: Classes of the model's blocks. Each block is gathered, compiled and recomputed as one. None: blocks
                are found automatically. Empty: the model is one block.
            collate: Makes a batch from a list of items. None: as torch's DataLoader does.
            shuffle: Read the samples in a random order, a different one in each epoch.
            order: The script's own order: a function of the epoch (from 0) that returns indices, as a sampler does,
                or batches of indices, of which each is the batch of a step. Any number of them, the same on all
                ranks. None: the session's, by seed and `shuffle`.
            scheduler_interval: "step" or "epoch".
            clip_grad_norm: Largest norm of the whole gradient. None: gradients are not clipped.
            tokens_per_sample: For the reported throughput, and for the memory of activations under `strategy: auto`.
            num_workers: Processes that fetch samples ahead. 0: the training process fetches them. None: one process,
                if samples are slow to fetch.
            loader: More arguments of torch's DataLoader: prefetch_factor, pin_memory, worker_init_fn,
                multiprocessing_context, timeout.
            stateful: The script's own variables, by a name for each: every commit holds them, and a resume restores
                them. Their states are plain values and tensors, the same on all ranks or in shards (DTensors).
            deepspeed_config: DeepSpeed's JSON configuration, as content or path, for the strategy deepspeed. Leave
                out the settings that the job decides, or let them agree with it.

        Returns:
            The model in training. Its `steps` are the loop.

        Raises:
            UserError: The model, the data and the job do not go together.

        Example:
            >>> import spottrain, torch
            >>> data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
            >>> with spottrain.session(global_batch=4, strategy="ddp") as session:
            ...     training = session.prepare(
            ...         torch.nn.Linear(3, 1),
            ...         optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
            ...         dataset=data,
            ...     )
            ...     for step in training.steps(total=3):
            ...         for inputs, targets in step.micro_batches():  # (micro, 3) and (micro, 1)
            ...             step.backward(torch.nn.functional.mse_loss(training.model(inputs), targets))
            ...         step.update()
            >>> training.step
            3
        """
        self._refuse_second()
        self._context.reporter.milestone("model_built")
        data = Data(dataset, collate, num_workers, shuffle, loader or {})
        ordered = order_of(data, self.config.seed, order=order, largest_batch=self.batch_plan.global_batch)
        check_model(model)
        check_same_model(model)
        check_stateful(stateful or {})
        optimizer = checked_optimizer(optimizer)
        check_scheduler_interval(scheduler_interval)
        with as_user_errors():
            engine_config = self._assembly.engine_config(
                clip_grad_norm=clip_grad_norm, wrap=wrap, deepspeed_config=deepspeed_config
            )
            choice = choose_strategy(
                model,
                engine_config,
                self._joined.store,
                launch=self._joined.launch,
                groups=self._joined.groups,
                tokens_per_sample=tokens_per_sample,
            )
            if choice is not None:
                self._context.reporter.update(strategy=choice)
                engine_config = applied(choice, engine_config)
            engine_name = choice.strategy if choice is not None else self.config.strategy.value
            engine = choose_engine(engine_name, engine_config)
            self._assembly.prepare_blocks(model, wrap)
        spread, made_optimizer = engine.wrap(model, optimizer)
        slow = slower_than_needed(engine_config.precision, self.device)
        if slow is not None and self.rank == 0:
            logger.warning(slow)
        self._training = self._assembly.training_with_data(
            engine,
            spread,
            data,
            ordered,
            tokens_per_sample=tokens_per_sample,
            scheduler_interval=scheduler_interval,
            optimizers={OPTIMIZER: made_optimizer},
            schedulers=numbered(
                SCHEDULER, checked_scheduler(scheduler, made_optimizer) if scheduler is not None else None
            ),
            model_config=model_config(model),
            peft=peft_adapters(model) if self.rank == 0 else None,
            stateful=stateful,
            engine_name=engine_name,
            strategy=choice,
        )
        return self._training

    def adopt(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        dataset: MapDataset | Streams,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        accumulates: bool = True,
        collate: Collate | None = None,
        shuffle: bool = True,
        order: OrderFunction | None = None,
        tokens_per_sample: int | None = None,
        num_workers: int | None = None,
        loader: Mapping[str, Any] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        records: Mapping[str, Stateful] | None = None,
        instead: Mapping[str, str] | None = None,
    ) -> Training:
        """Adopt a model that a different framework has spread and trains.

        The framework has a loop of its own. Drive its steps with a `ForeignLoop`, as the adapters do. The framework
        then decides precision, activation checkpointing, compilation and the settings of FSDP. A collective.

        Args:
            model: The model as the framework has spread it: by DDP, by FSDP2, or not at all.
            optimizer: The model's optimizer, or several.
            dataset: The training data: anything with a length and items by index, or `spottrain.data.Streams`.
            scheduler: The optimizer's schedule, which the framework steps, or several.
            accumulates: Whether the framework accumulates the gradients of micro-batches. Otherwise, a rank has its
                part of a batch in one.
            collate: Makes a batch from a list of items. None: as torch's DataLoader does.
            shuffle: Read the samples in a random order, a different one in each epoch.
            order: As for `prepare`.
            tokens_per_sample: For the reported throughput.
            num_workers: As for `prepare`.
            loader: As for `prepare`.
            stateful: As for `prepare`: parts that are the same on all ranks.
            records: Parts of the framework of which a commit holds rank 0's state, as the framework's own checkpoints
                do.
            instead: The framework's own name for a setting, by the job's field; for messages.

        Returns:
            The model in training.

        Raises:
            UserError: The job asks for a setting that only the framework can apply, or a state cannot be saved.
        """
        from spottrain.engines.adopted import check_spread, refuse_unapplied  # imports FSDP, which is slow
        from spottrain.engines.attached import AttachedModels

        self._refuse_second()
        model = inside(model)
        data = Data(dataset, collate, num_workers, shuffle, loader or {})
        ordered = order_of(data, self.config.seed, order=order, largest_batch=self.batch_plan.global_batch)
        check_adopted_model(model, self.world_size)
        optimizers, schedulers = numbered(OPTIMIZER, optimizer), numbered(SCHEDULER, scheduler)
        for each in optimizers.values():
            check_optimizer(each, model)
        for schedule in schedulers.values():
            check_scheduler(schedule)
        with as_user_errors():
            check_spread(self.config.strategy, model, self.world_size)
            refuse_unapplied(self.config, instead or {})
        check_stateful(stateful or {}, records)
        plain = getattr(model, "module", model)
        self._training = self._assembly.training_with_data(
            AttachedModels({MODEL: model}, optimizers),
            model,
            data,
            ordered,
            plan=self.batch_plan if accumulates else self._whole_parts,
            tokens_per_sample=tokens_per_sample,
            optimizers=optimizers,
            schedulers=schedulers,
            model_config=model_config(plain),
            peft=peft_adapters(plain) if self.rank == 0 else None,
            stateful={**(stateful or {}), **(records or {})},
            records=frozenset(records or {}),
        )
        return self._training

    def attach(
        self,
        *,
        total: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        dataset: MapDataset | Streams | None = None,
        collate: Collate | None = None,
        shuffle: bool = True,
        order: OrderFunction | None = None,
        num_workers: int | None = None,
        loader: Mapping[str, Any] | None = None,
        **attached: Any,
    ) -> Run:
        """Take what a script trains in a loop of its own, and resume from the newest commit.

        The script spreads its models, and steps its optimizers and schedules. Commits hold the state of all that is
        attached, by its name. Random numbers are then those of this rank. A collective: every rank attaches the same,
        in the same order.

        Args:
            total: Steps of the whole run, not of this generation. A step is what lies between two calls of
                `Run.boundary`.
            epochs: Epochs of the whole run: see `Run.epochs`. With `total`, it ends with what comes first.
            steps_per_epoch: Steps of each epoch of a script that reads its data itself.
            dataset: The training data, for `Run.batches` and `Run.epochs`. None: the script reads its data itself.
            collate: As for `prepare`.
            shuffle: As for `prepare`.
            order: As for `prepare`.
            num_workers: As for `prepare`.
            loader: As for `prepare`.
            attached: Modules as they were spread (by DDP, FSDP2 or not at all), optimizers, schedules, tensors, lists
                and dicts and arrays that are changed in place, and other objects with state_dict and load_state_dict,
                by names of the script's choice. The state of each is the same on all ranks, or in shards (DTensors),
                or each rank's own in a `ByRank`.

        Returns:
            The run. Train until its `step` is `total`, or loop over its `batches` or `epochs`, and call its
            `boundary` once a step.

        Raises:
            UserError: Something has no state that a commit could hold, or the newest commit does not fit.
        """
        from spottrain.engines.attached import AttachedModels  # imports FSDP, which is slow

        self._refuse_second()
        check_length(total, epochs, steps_per_epoch, has_data=dataset is not None)
        found = Attachment.of(attached)
        found.check_sizes(*self._assembly.world_sizes())
        plan = self._whole_parts
        data: RankData | OwnData = OwnData.of(plan, seed=self.config.seed, steps_per_epoch=steps_per_epoch)
        if dataset is not None:
            read = Data(dataset, collate, num_workers, shuffle, loader or {})
            ordered = order_of(read, self.config.seed, order=order, largest_batch=plan.global_batch)
            data = self._assembly.rank_data(read, ordered, plan)
        elif collate is not None or order is not None or num_workers is not None or loader is not None:
            raise UserError(
                "collate, order, num_workers and loader say how a data set is read, and session.attach was given "
                "none; pass dataset, too. If one of them is the name of a state, choose another name"
            )
        model = found.models.get(MODEL)
        plain = getattr(model, "module", model)
        models = AttachedModels(found.models, found.optimizers, found.tensors)
        self._training = self._assembly.training(
            models,
            model if model is not None else nn.Module(),
            data,
            optimizers=found.optimizers,
            schedulers=found.schedulers,
            model_config=model_config(plain) if plain is not None else None,
            peft=peft_adapters(plain) if plain is not None and self.rank == 0 else None,
            stateful=found.parts,
            by_rank=found.rank_parts(rank=self.rank, world_size=self.world_size),
        )
        return Run(
            self._training,
            total=total,
            epochs=epochs,
            has_data=dataset is not None,
            rank=self.rank,
            model_state=models.model_state,
            optimizers=found.stepped.values(),
        )

    def spread(self, model: Model, *, wrap: Collection[type[nn.Module]] | None = None) -> Model:
        """Spread a model by the job's strategy, for `attach`; as often as the script has models.

        `ddp`, or `fsdp` with FSDP2; `auto` is `ddp`. The job's precision, compilation and activation checkpointing
        apply, and gradients are averaged over the ranks in each backward pass. A collective: every rank calls it with
        the same model, and makes its optimizer afterwards.

        Args:
            model: The whole model, on the CPU or on the session's device. It may be frozen, as a teacher is.
            wrap: As for `prepare`.

        Returns:
            The model to call in forward, and to attach.

        Raises:
            UserError: The strategy is deepspeed, or it can't spread this model for a loop of the script's own.
        """
        check_model(model, may_be_frozen=True)
        check_same_model(model)
        if self.config.strategy == Strategy.DEEPSPEED:
            raise UserError(
                "session.spread is for ddp and fsdp: DeepSpeed steps the one optimizer of the one model itself. Set "
                "the job's strategy to fsdp, or train by session.prepare"
            )
        with as_user_errors():
            config = self._assembly.engine_config(wrap=wrap)
            self._assembly.prepare_blocks(model, wrap)
            return cast(Model, spread_alone(self.config.strategy, config, model))

    def _refuse_second(self) -> None:
        """Raises UserError if the session has a model in training. A call that has failed may be repeated."""
        if self._training is not None:
            raise UserError(
                "the session was given a second model, and a session trains one: the commits of the second would "
                "replace those of the first. Give both to session.attach, or train the second in a job of its own"
            )

    @property
    def _whole_parts(self) -> BatchPlan:
        """The same, with each rank's part of a batch in one micro-batch."""
        return replace(self.batch_plan, micro_batch=self.batch_plan.global_batch)

    @property
    def batch_plan(self) -> BatchPlan:
        """How the ranks of this generation share the global batch.

        Raises:
            UserError: The batch and the number of ranks do not go together.
        """
        return self._assembly.batch_plan

    @property
    def _assembly(self) -> Assembly:
        return Assembly(config=self.config, joined=self._joined, built=self._built)

    def catch_sigterm(self) -> None:
        """Treat SIGTERM as a request to drain. Call it again if a framework has installed a handler of its own."""
        self._context.drain.catch_sigterm()

    def finish(self) -> None:
        """Commit the last step, if the script left the loop early. Raises Drained if the ranks stop meanwhile."""
        if self._training is not None:
            self._training.finish()

    def end(self, kind: OutcomeKind) -> None:
        """Leave the world together with the other ranks, at the end of the session."""
        if self._training is not None:
            self._training.end()
            if kind is OutcomeKind.SUCCEEDED:
                self._training.clean_up()
        self._joined.leave(kind)
