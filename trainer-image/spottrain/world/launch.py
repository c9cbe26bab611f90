"""How this process was started: by an operator's agent, by torchrun, or alone."""

from __future__ import annotations

import logging
import os
import resource
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from spottrain import exchange
from spottrain.world.failures import UserError, as_user_errors
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.message import Message
from spottrain_api.contract.names import ENV_GPUS, ENV_RUN_DIR, FILE_RUN, outcome_file
from spottrain_api.contract.reports import FailureReason

logger = logging.getLogger(__name__)

PROCESS_GROUP_TIMEOUT = timedelta(minutes=30)
# Around a checkpoint, ranks also wait for each other's uploads and reads. A slow store may need hours for these, and
# a save is not given up for it. A lost rank closes its connection, or the operator or torchrun misses it.
CHECKPOINT_GROUP_TIMEOUT = timedelta(days=1)
# Where a container has the GPUs that it was given, each with its number.
DEVICES = Path("/dev")


class _Generation(Message):
    """What is read of a TrainerConfig of any version."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This rank's place in the world, and the run directory if an agent started it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    run_dir: Path | None

    @classmethod
    def from_environment(cls) -> Launch:
        """Read what torchrun and the agent have set; without either, a world of one."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        run_dir = os.environ.get(ENV_RUN_DIR)
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=local_rank,
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            device=torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu"),
            run_dir=Path(run_dir) if run_dir else None,
        )

    def peak_memory(self) -> int:
        """The most bytes that this process has needed.

        They are those of its accelerator or, without one, of the CPU.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @property
    def generation(self) -> int:
        """Number of the generation; 0 without an agent. It is known even if the rest of run.json can't be read."""
        config = _Generation.read(self.run_dir / FILE_RUN) if self.run_dir is not None else None
        return config.generation if config is not None else 0

    def read_config(self) -> TrainerConfig | None:
        """Read what the agent wrote for this generation; None if there is no agent.

        Raises:
            UserError: This version doesn't know a setting, the file is missing, or this rank has had its session: a
                second one would resume from the commits of the first.
        """
        if self.run_dir is None:
            return None
        if (self.run_dir / outcome_file(self.local_rank)).exists():
            raise UserError(
                "the script opened a second spottrain.session(), which would resume from the commits of the first; a "
                "job has one session: do all of its training inside, or make another job"
            )
        path = self.run_dir / FILE_RUN
        with as_user_errors():
            config = TrainerConfig.read(path)
        if config is None:
            message = f"{ENV_RUN_DIR} is set, but there is no {path}; unset it to run without an operator."
            raise UserError(message)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups besides the default one; None in a world of one.

    Each is used by one part alone, so that the order of collectives cannot differ between ranks.
    """

    agreement: dist.ProcessGroup | None
    checkpoint: dist.ProcessGroup | None


def join_world(launch: Launch) -> Groups:
    """Initialise torch.distributed. NCCL serves CUDA, and gloo serves everything on the CPU.

    Raises:
        UserError: This rank has no GPU of its own, or torch can't use the GPUs that are there.
    """
    backend = "gloo"
    if launch.device.type == "cpu" and (why := _why_gpus_are_not_used()):
        raise UserError(why, FailureReason.START_FAILED)
    if launch.device.type == "cpu" and (why := _why_gpus_are_missing()):
        raise UserError(why, FailureReason.DEVICE_FAILED)
    if launch.device.type == "cuda":
        if launch.local_rank >= (num_devices := torch.cuda.device_count()):
            asked = _gpus_asked_for()
            has_failed = asked is not None and num_devices < asked and launch.local_world_size <= asked
            raise UserError(
                f"this node runs {launch.local_world_size} ranks and has {num_devices} visible GPU(s), and each rank "
                "needs one of its own; run as many ranks on a node as it has GPUs (processesPerNode, or torchrun's "
                '--nproc-per-node), or set CUDA_VISIBLE_DEVICES="" to train on the CPU',
                FailureReason.DEVICE_FAILED if has_failed else FailureReason.INVALID_CONFIGURATION,
            )
        torch.cuda.set_device(launch.device)
        backend = "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=PROCESS_GROUP_TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=PROCESS_GROUP_TIMEOUT)
    if launch.world_size == 1:
        return Groups(agreement=None, checkpoint=None)
    return Groups(
        agreement=gloo_group(),
        checkpoint=gloo_group(CHECKPOINT_GROUP_TIMEOUT),
    )


def _why_gpus_are_not_used() -> str | None:
    """Why torch uses none of the NVIDIA GPUs that are there. None if there is none, or the user has hidden them."""
    found = sorted(DEVICES.glob("nvidia[0-9]*"))
    if not found or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it finds no CUDA device"
    except (AssertionError, RuntimeError) as error:  # the former from a torch that is built for CPUs
        reason = str(error).strip().rstrip(".").replace("\n", " ")
    return (
        f"this node has a GPU ({found[0]}), but torch {torch.__version__} can't use it: {reason}; see that the "
        "node's NVIDIA driver is new enough for that torch, and that LD_LIBRARY_PATH has the folder of its libraries "
        '(on GKE /usr/local/nvidia/lib64), or set CUDA_VISIBLE_DEVICES="" to train on the CPU'
    )


def _gpus_asked_for() -> int | None:
    """How many GPUs the pod has asked for; None without an operator, or if it asked for none."""
    asked = os.environ.get(ENV_GPUS, "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def _why_gpus_are_missing() -> str | None:
    """Why a container has no GPU though its pod asked for some. None if it asked for none, or the user hides them."""
    asked = _gpus_asked_for()
    if asked is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    return (
        f"the pod asked for {asked} GPU(s), and its container has none (no {DEVICES}/nvidia0): its container runtime "
        "is not NVIDIA's. Set podTemplate.runtimeClassName to the class of NVIDIA's runtime (mostly nvidia), make it "
        'the default of the nodes, or set CUDA_VISIBLE_DEVICES="" to train on the CPU'
    )


def gloo_group(timeout: timedelta = PROCESS_GROUP_TIMEOUT) -> dist.ProcessGroup:
    """A new group of all ranks for what is on the CPU.

    All ranks make their groups in the same order. A collective fails if a rank is later than `timeout`.
    """
    # From torch 2.15 on, its type says what a rank that is not in the group gets; here every rank is.
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))


def barrier(groups: Groups) -> None:
    """Wait for all ranks. A rank that still works would mistake the exit of a different one for a loss."""
    if groups.agreement is None:
        return
    try:
        dist.barrier(group=groups.agreement)
    except RuntimeError as error:
        # A rank that arrived earlier, or failed, is gone already. This rank has done its part.
        logger.info("A rank left early: %s", error)


def identify_run(generation: int) -> tuple[int, str]:
    """Rank 0's `generation` and an id unique to this start, on all ranks, for runs without an operator."""
    generation, attempt_id = exchange.broadcast([generation, uuid.uuid4().hex])
    return generation, attempt_id


def process_started_at() -> datetime:
    """When this process started, by the kernel's clock, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    uptime_seconds = float(Path("/proc/uptime").read_text().split()[0])
    age_seconds = uptime_seconds - ticks / os.sysconf("SC_CLK_TCK")
    return datetime.now(UTC) - timedelta(seconds=age_seconds)
