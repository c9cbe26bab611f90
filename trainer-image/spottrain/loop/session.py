"""The session: what surrounds a training script, from joining the world to the outcome."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spottrain.checkpoint import Replicas
from spottrain.data import random_state
from spottrain.data.audit import AuditHeader, AuditWriter
from spottrain.data.batch import BatchPlan
from spottrain.data.loader import Collate, Data, MapDataset
from spottrain.data.order import DataOrder
from spottrain.engines import AUTO, Engine, EngineConfig, MakeOptimizer, choose_engine
from spottrain.engines.auto import Machine, applied, choose_automatically, least_of_all
from spottrain.engines.blocks import find_blocks, prepare_blocks
from spottrain.loop.acceptance import (
    check_adopted_model,
    check_data,
    check_model,
    check_optimizer,
    check_scheduler,
    check_stateful,
    checked_optimizer,
    checked_scheduler,
)
from spottrain.loop.stability import STABILITY, StabilityGuard
from spottrain.loop.training import Training
from spottrain.recovery.interval import CommitInterval
from spottrain.recovery.open_store import open_checkpoints, retention_of
from spottrain.recovery.peft_adapters import peft_adapters
from spottrain.recovery.schedule import CheckpointSchedule
from spottrain.recovery.training_state import STRATEGY, Stateful, TrainingState, model_config
from spottrain.world.drain import DrainFlag, sleep_undrained
from spottrain.world.failures import Drained, UserError, as_user_errors, failure_of
from spottrain.world.launch import Launch, join_world, meet, process_started_at
from spottrain.world.progress import ProgressReporter
from spottrain.world.stop_agreement import StopAgreement
from spottrain_api.contract import (
    ENV_AUDIT_DIR,
    FailureReason,
    OnNotice,
    OutcomeKind,
    Precision,
    StabilityConfig,
    StrategyChoice,
    TrainerConfig,
)

_PRECISIONS: dict[Precision, torch.dtype] = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


@contextmanager
def session(
    *,
    global_batch: int = 32,
    micro_batch: int = 8,
    seed: int = 0,
    strategy: str = "auto",
    precision: str = "fp32",
    activation_checkpointing: bool = False,
    compile: bool = False,
    checkpoint_uri: str | None = None,
    checkpoint_interval: str = "auto",
    stability: StabilityConfig | None = None,
) -> Iterator[Session]:
    """Join the world, open the checkpoints, and report how the script ends.

    A context manager that every rank enters once, around the whole training. It sets the seed, the same on all
    ranks, so that every rank builds the same model.

    The arguments are for runs without an operator (`torchrun script.py`, `python script.py`). In a TrainingJob, its
    spec decides instead.

    Args:
        global_batch: Samples of one optimizer step, whatever the number of ranks.
        micro_batch: Samples of one forward pass on one rank, at most.
        seed: Seed of the random numbers and of the order of the samples.
        strategy: "auto", "ddp", "fsdp" or "deepspeed".
        precision: "fp32", "bf16" or, under DeepSpeed, "fp16".
        activation_checkpointing: Compute the activations of the model's blocks again in backward, to save memory.
        compile: Run the model's blocks through torch.compile.
        checkpoint_uri: Folder of the commits: file://, s3:// or gs://. None: nothing is saved.
        checkpoint_interval: "auto", or a number with its unit: "50steps", "30s", "5m".
        stability: What to do about steps that would spoil the model. None: steps are not judged.

    Yields:
        The session of this rank.

    Raises:
        UserError: The configuration is invalid, or the checkpoint store cannot be used. It is shown as a sentence,
            and the script ends with exit code 1.

    Example:
        >>> import spottrain
        >>> with spottrain.session(global_batch=4, micro_batch=2) as session:
        ...     print(f"rank {session.rank} of {session.world_size}")
        rank 0 of 1
    """
    launch = Launch.from_environment()
    reporter = ProgressReporter(launch.run_dir, local_rank=launch.local_rank, generation=launch.generation)
    with _reported(reporter, launch.rank):
        with as_user_errors():
            config = launch.read_config() or TrainerConfig.model_validate(
                {
                    "job": "local",
                    "generation": 0,
                    "attempt_id": "",
                    "seed": seed,
                    "strategy": strategy,
                    "precision": precision,
                    "activation_checkpointing": activation_checkpointing,
                    "compile": compile,
                    "batch": {"global": global_batch, "micro": micro_batch},
                    "checkpoint": {"uri": checkpoint_uri, "interval": checkpoint_interval},
                    "stability": stability,
                }
            )
        current = Session(launch, config, reporter)
        try:
            yield current
        except Drained:
            current.end(OutcomeKind.DRAINED)
            raise
        current.end(OutcomeKind.SUCCEEDED)


class Session:
    """One rank of one generation; made by `session()`.

    Attributes:
        rank: Number of this rank in the world, from 0.
        local_rank: Number of this rank on its node, from 0.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this node.
        device: Device on which this rank trains.
    """

    def __init__(self, launch: Launch, config: TrainerConfig, reporter: ProgressReporter) -> None:
        """Joins the world. Raises UserError if the configuration or the checkpoint store is unusable."""
        self.rank = launch.rank
        self.local_rank = launch.local_rank
        self.world_size = launch.world_size
        self.local_world_size = launch.local_world_size
        self.device = launch.device
        self._reporter = reporter
        self._drain = DrainFlag(launch.run_dir, on_seen=lambda at: reporter.update(drain_seen_at=at))
        self.catch_sigterm()
        self._training: Training | None = None
        self._interval = CommitInterval.parse(config.checkpoint.interval, config.interruptions)
        reporter.milestone("python_started", process_started_at())
        reporter.milestone("session_started")
        self._groups = join_world(launch)
        reporter.milestone("process_group")
        random_state.seed_everything(config.seed)
        self._agreement = StopAgreement(self._groups.agreement)
        try:
            sleep = partial(sleep_undrained, flag=self._drain, agreement=self._agreement)
            opened = open_checkpoints(config, launch, self._groups, reporter, sleep=sleep)
        except Drained:
            self.end(OutcomeKind.DRAINED)
            raise
        self.config, self._checkpointer, self._newest = opened.config, opened.checkpointer, opened.newest
        self._newest_extra = opened.newest_extra
        reporter.milestone("checkpoint_store")

    def prepare(
        self,
        model: nn.Module,
        *,
        optimizer: MakeOptimizer,
        dataset: MapDataset,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        wrap: Collection[type[nn.Module]] | None = None,
        collate: Collate | None = None,
        shuffle: bool = True,
        clip_grad_norm: float | None = None,
        tokens_per_sample: int | None = None,
        num_workers: int | None = None,
        loader: Mapping[str, Any] | None = None,
        deepspeed_config: Mapping[str, Any] | str | Path | None = None,
    ) -> Training:
        """Spread `model` over the ranks, and put together what a step needs.

        Every rank calls it once, with the same model. A collective.

        Args:
            model: The whole model, on the CPU or on the session's device.
            optimizer: Called with the spread model; returns its optimizer.
            dataset: The training data: anything with a length and items by index.
            scheduler: Called with the optimizer; returns a schedule that steps once an optimizer step.
            wrap: Classes of the model's blocks, which are gathered, compiled and recomputed as one. None: blocks are
                found by themselves. Empty: the model as a whole.
            collate: Makes a batch of a list of items. None: as torch's DataLoader.
            shuffle: Read the samples in a random order, another in each epoch.
            clip_grad_norm: Largest norm of the whole gradient. None: gradients are not clipped.
            tokens_per_sample: For throughput, and for the memory of activations under `strategy: auto`.
            num_workers: Processes that fetch samples ahead. 0: the training process fetches them. None: one process,
                if samples take their time.
            loader: More arguments of torch's DataLoader: prefetch_factor, pin_memory, worker_init_fn,
                multiprocessing_context, timeout.
            deepspeed_config: A DeepSpeed JSON, its content or its path, for the strategy deepspeed. Settings that the
                job decides are left out there, or agree with it.

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
        self._reporter.milestone("model_built")
        data = Data(dataset, collate, num_workers, shuffle, loader or {})
        order = self._order_of(data)
        check_model(model)
        optimizer = checked_optimizer(optimizer)
        with as_user_errors():
            engine_config = EngineConfig(
                device=self.device,
                plan=self.batch_plan,
                local_world_size=self.local_world_size,
                precision=_PRECISIONS[self.config.precision],
                clip_grad_norm=clip_grad_norm,
                wrap=wrap,
                fsdp=self.config.fsdp,
                deepspeed=self.config.deepspeed,
                deepspeed_config=deepspeed_config,
            )
            choice = self._choose_strategy(model, engine_config, tokens_per_sample)
            if choice is not None:
                engine_config = applied(choice, engine_config)
            engine_name = choice.strategy if choice is not None else self.config.strategy.value
            engine = choose_engine(engine_name, engine_config)
            prepare_blocks(
                model,
                find_blocks(model, wrap),
                compiled=self.config.compile,
                checkpointed=self.config.activation_checkpointing,
            )
        spread, made_optimizer = engine.wrap(model, optimizer)
        return self._assemble(
            engine,
            spread,
            data,
            order,
            tokens_per_sample=tokens_per_sample,
            scheduler=checked_scheduler(scheduler, made_optimizer) if scheduler is not None else None,
            model_config=model_config(model),
            peft=peft_adapters(model) if self.rank == 0 else None,
            engine_name=engine_name,
            strategy=choice,
        )

    def adopt(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        dataset: MapDataset,
        scheduler: LRScheduler | None = None,
        collate: Collate | None = None,
        shuffle: bool = True,
        tokens_per_sample: int | None = None,
        num_workers: int | None = None,
        loader: Mapping[str, Any] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        instead: Mapping[str, str] | None = None,
    ) -> Training:
        """Take in a model that another framework has spread and trains in a loop of its own.

        Drive its steps with a `ForeignLoop`, as the adapters do. Precision, activation checkpointing, compiling and
        the settings of FSDP are the framework's business then. A collective.

        Args:
            model: The model as the framework has spread it: DDP, FSDP2, or not at all.
            optimizer: The model's optimizer.
            dataset: The training data: anything with a length and items by index.
            scheduler: The optimizer's schedule, which the framework steps.
            collate: Makes a batch of a list of items. None: as torch's DataLoader.
            shuffle: Read the samples in a random order, another in each epoch.
            tokens_per_sample: For throughput.
            num_workers: As for `prepare`.
            loader: As for `prepare`.
            stateful: Parts of the framework that are saved and resumed with the model. Their states are plain values
                and small tensors, the same on all ranks.
            instead: Where the framework has a setting, by the field of the job; for messages.

        Returns:
            The model in training.

        Raises:
            UserError: The job asks for a setting that only the framework can apply, or a state cannot be saved.
        """
        from spottrain.engines.adopted import AdoptedEngine, refuse_unapplied  # with FSDP, which takes its time

        self._refuse_second()
        engine = AdoptedEngine(optimizer)
        model = getattr(model, "_orig_mod", model)  # of torch.compile, around what the framework has spread
        data = Data(dataset, collate, num_workers, shuffle, loader or {})
        order = self._order_of(data)
        check_adopted_model(model, self.world_size)
        check_optimizer(optimizer)
        if scheduler is not None:
            check_scheduler(scheduler)
        with as_user_errors():
            engine.check(self.config.strategy, model, self.world_size)
            refuse_unapplied(self.config, instead or {})
        check_stateful(stateful or {})
        spread, _ = engine.wrap(model, lambda _: optimizer)
        plain = getattr(model, "module", model)
        return self._assemble(
            engine,
            spread,
            data,
            order,
            tokens_per_sample=tokens_per_sample,
            scheduler=scheduler,
            model_config=model_config(plain),
            peft=peft_adapters(plain) if self.rank == 0 else None,
            stateful=stateful,
        )

    def _refuse_second(self) -> None:
        """Raises UserError where the session has a model in training. A call that has failed may be repeated."""
        if self._training is not None:
            raise UserError(
                FailureReason.INVALID_CONFIGURATION,
                "the session was given a second model, and a session trains one: the commits of the second would "
                "take the place of the first's. Put both into one nn.Module with one optimizer (a group of "
                "parameters for each), or train the second in a job of its own",
            )

    @property
    def batch_plan(self) -> BatchPlan:
        """How the global batch is shared out over the ranks of this generation.

        Raises:
            UserError: The batch and the number of ranks do not go together.
        """
        with as_user_errors():
            return BatchPlan(
                global_batch=self.config.batch.global_,
                micro_batch=self.config.batch.micro,
                world_size=self.world_size,
            )

    def _order_of(self, data: Data) -> DataOrder:
        """Raises UserError for data that have none, or can't be read so."""
        check_data(data)
        with as_user_errors():
            return DataOrder(num_samples=len(data.dataset), seed=self.config.seed, shuffle=data.shuffle)

    def _assemble(
        self,
        engine: Engine,
        spread: nn.Module,
        data: Data,
        order: DataOrder,
        *,
        tokens_per_sample: int | None,
        stateful: Mapping[str, Stateful] | None = None,
        **state: Any,
    ) -> Training:
        """`state` are further fields of TrainingState."""
        plan = self.batch_plan
        header = AuditHeader(
            seed=order.seed, shuffle=order.shuffle, num_samples=order.num_samples, global_batch=plan.global_batch
        )
        guard = StabilityGuard(self.config.stability) if self.config.stability is not None else None
        parts = {**(stateful or {}), **({STABILITY: guard} if guard is not None else {})}
        self._training = Training(
            model=spread,
            state=TrainingState(engine=engine, identity=header.model_dump(), stateful=parts, **state),
            engine=engine,
            data=data,
            order=order,
            plan=plan,
            rank=self.rank,
            device=self.device,
            generation=self.config.generation,
            tokens_per_sample=tokens_per_sample,
            agreement=self._agreement,
            checkpoints=CheckpointSchedule(
                checkpointer=self._checkpointer,
                newest=self._newest,
                interval=self._interval,
                retention=retention_of(self.config),
                reporter=self._reporter,
                replicas=self._replicas(),
                waits_for_last_safe_moment=self.config.checkpoint.on_notice == OnNotice.LAST_SAFE,
            ),
            drain=self._drain,
            reporter=self._reporter,
            audit=self._open_audit(header),
            guard=guard,
        )
        self._reporter.milestone("prepared")
        return self._training

    def catch_sigterm(self) -> None:
        """Take SIGTERM as a request to drain; again, where a framework has put a handler of its own."""
        self._drain.catch_sigterm()

    def end(self, kind: OutcomeKind) -> None:
        """Leave the world together with the other ranks; called where the script ends without an error.

        A loop that was left early has its last step committed here. The outcome is written when all ranks
        are done, as the agent takes it for the end of the process.
        """
        if self._training is not None and kind is OutcomeKind.SUCCEEDED:
            self._training.finish()
            self._training.clean_up()
        meet(self._groups)
        self._reporter.finish(kind)
        dist.destroy_process_group()

    def _replicas(self) -> Replicas | None:
        """Peers' memory, where the job asks for it."""
        if self._checkpointer is None or self.config.memory is None:
            return None
        return Replicas(
            self.config.memory,
            generation=self.config.generation,
            rank=self.rank,
            world_size=self.world_size,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            group=self._groups.checkpoint,
        )

    def _choose_strategy(
        self, model: nn.Module, config: EngineConfig, tokens_per_sample: int | None
    ) -> StrategyChoice | None:
        """What `strategy: auto` comes to: what the job's commits say, so that the run stays the same one, else what
        fits into the memory of the ranks. A collective."""
        if self.config.strategy != AUTO:
            return None
        recorded = self._newest_extra.get(STRATEGY)
        if recorded is not None:
            choice = StrategyChoice.model_validate(recorded)
        else:
            choice = choose_automatically(
                model,
                config,
                least_of_all(Machine.of(self.device, self.local_world_size), self._groups.agreement),
                min_world_size=self.config.min_world_size or self.world_size,
                tokens_per_sample=tokens_per_sample,
                activation_checkpointing=self.config.activation_checkpointing,
            )
        self._reporter.update(strategy=choice)
        return choice

    def _open_audit(self, header: AuditHeader) -> AuditWriter | None:
        folder = os.environ.get(ENV_AUDIT_DIR)
        if not folder:
            return None
        return AuditWriter(Path(folder), header, generation=self.config.generation, rank=self.rank)


@contextmanager
def _reported(reporter: ProgressReporter, rank: int) -> Iterator[None]:
    """Leave the outcome of what runs inside, and show a user's mistake as a sentence."""
    try:
        yield
    except Drained:
        raise
    except BaseException as error:
        failure = failure_of(error, rank)
        reporter.finish(OutcomeKind.SUCCEEDED if failure is None else OutcomeKind.FAILED, failure)
        if isinstance(error, UserError):
            print(f"spottrain: {error}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
        raise
