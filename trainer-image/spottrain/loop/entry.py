"""How a script enters its session, and how its end is reported."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from spottrain.checkpoint.errors import CheckpointError
from spottrain.loop.session import Session
from spottrain.world.failures import Drained, UserError, as_user_errors, failure_of
from spottrain.world.launch import Launch
from spottrain.world.one_session import owned_by_this_process, refuse_in_child
from spottrain.world.progress import ProgressReporter
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.names import ENV_NAMESPACE, ENV_POD_NAME
from spottrain_api.contract.reports import OutcomeKind
from spottrain_api.settings.stability import StabilityConfig
from spottrain_runtime import logs

logger = logging.getLogger(__name__)


@contextmanager
def session(
    *,
    global_batch: int = 32,
    micro_batch: int = 8,
    batch_multiple_of: int = 1,
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

    A context manager that every rank enters once, around the whole training. It seeds all ranks alike, so that every
    rank builds the same model.

    The arguments are for runs without an operator (`torchrun script.py`, `python script.py`). In a TrainingJob, the
    spec decides instead.

    Args:
        global_batch: Samples of one optimizer step, for any number of ranks.
        micro_batch: Largest number of samples of one forward pass on one rank.
        batch_multiple_of: A number of which the samples of every forward pass are a multiple: 2 for even ones.
        seed: Seed of the random numbers and of the order of the samples.
        strategy: "auto", "ddp", "fsdp" or "deepspeed".
        precision: "fp32", "bf16" or, under DeepSpeed, "fp16".
        activation_checkpointing: Recompute the activations of the model's blocks in backward, to save memory.
        compile: Run the model's blocks through torch.compile.
        checkpoint_uri: Folder of the commits: file://, s3://, gs:// or az://. None: nothing is saved.
        checkpoint_interval: "auto", or a number with its unit: "50steps", "30s", "5m".
        stability: What to do about steps that would spoil the model. None: steps are not checked.

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
    _refuse_in_child()
    launch = Launch.from_environment()
    reporter = ProgressReporter(
        launch.run_dir,
        local_rank=launch.local_rank,
        generation=launch.generation,
        peak_memory=launch.peak_memory,
    )
    with owned_by_this_process(), _reported(reporter, launch.rank):
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
                    "batch": {"global": global_batch, "micro": micro_batch, "multipleOf": batch_multiple_of},
                    "checkpoint": {"uri": checkpoint_uri, "interval": checkpoint_interval},
                    "stability": stability,
                }
            )
            logs.configure_library("spottrain")
        logs.remember(
            namespace=os.environ.get(ENV_NAMESPACE),
            job=config.job,
            generation=config.generation,
            member=os.environ.get(ENV_POD_NAME),
            rank=launch.rank,
        )
        current, pid = Session(launch, config, reporter), os.getpid()
        try:
            yield current
            if os.getpid() == pid:  # a process that the script forks may leave the block, too
                current.finish()
        except Drained:
            if os.getpid() == pid:
                current.end(OutcomeKind.DRAINED)
            raise
        if os.getpid() == pid:
            current.end(OutcomeKind.SUCCEEDED)


def _refuse_in_child() -> None:
    """End a child of a rank that opens a session, with a sentence. A report would be taken for the rank's own."""
    try:
        refuse_in_child()
    except UserError as error:
        logs.say(logger, str(error))
        raise SystemExit(1) from None


@contextmanager
def _reported(reporter: ProgressReporter, rank: int) -> Iterator[None]:
    """Write the outcome of what runs inside, and show a user's mistake as a sentence.

    A process that the script forks inside leaves it to the rank.
    """
    pid = os.getpid()
    try:
        yield
    except Drained:
        raise
    except BaseException as error:
        if os.getpid() != pid:
            raise
        failure = failure_of(error, rank)
        reporter.finish(OutcomeKind.SUCCEEDED if failure is None else OutcomeKind.FAILED, failure)
        if isinstance(error, UserError | CheckpointError):
            logs.say(logger, str(error))
            raise SystemExit(1) from None
        raise
