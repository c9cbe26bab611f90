"""Runs torchrun for one generation, in a process forked from the zygote, which has torch imported.

The command line is torchrun's own, and torchrun's own parser reads it. There is one difference from a shell: the
workers are forked, too (`--start-method=fork` with a function as entrypoint), so that nobody imports torch again.
They run the script as `python script.py` would (worker.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spottrain_agent.ports import bind
from spottrain_agent.records import FILE_LAUNCHER, FILE_TORCHRUN_LOG, LauncherEnded
from spottrain_agent.worker import Console, run_worker
from spottrain_api.contract.assignments import GenerationAssignment
from spottrain_api.contract.message import Message
from spottrain_api.settings.entrypoint import Entrypoint

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.launcher.api import LaunchConfig

# How long a member waits for the other members at the rendezvous store.
RENDEZVOUS_TIMEOUT_SECONDS = 120
# Ranks whose peer has failed can only say so.
RANKS_END_SECONDS = 5


class LaunchRequest(Message):
    """What the agent asks the zygote to start."""

    torchrun_arguments: tuple[str, ...]
    environment: dict[str, str]
    entrypoint: Entrypoint
    run_dir: str


def torchrun_arguments(generation: GenerationAssignment, address: str, run_dir: Path) -> tuple[str, ...]:
    """The torchrun command line of one member, without the leading `torchrun`.

    It has no arguments of the script: workers get those with the entrypoint. torchrun's parser would read some as
    abbreviations of its own options: `--log` for `--log-dir`.

    The rendezvous is torchrun's static one, not c10d, because the operator has already decided who takes part and
    with which rank. It needs no polling (c10d looks once a second), and it keeps the operator's node ranks. With it,
    the process group's store is on the member with node rank 0; with c10d, it is on the member with the lowest
    address.
    """
    entrypoint = generation.entrypoint
    program = ("--module", entrypoint.module) if entrypoint.module else (entrypoint.script or "",)
    return (
        f"--nnodes={generation.num_nodes}",
        f"--nproc-per-node={generation.processes_per_node}",
        f"--node-rank={generation.node_rank}",
        "--rdzv-backend=static",
        f"--rdzv-endpoint={generation.rendezvous_endpoint}",
        f"--rdzv-id={generation.rendezvous_id}",
        f"--rdzv-conf=timeout={RENDEZVOUS_TIMEOUT_SECONDS}",
        f"--local-addr={address}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--start-method=fork",
        f"--log-dir={run_dir / 'torchrun'}",
        *program,
    )


def run_launcher(request: LaunchRequest) -> int:
    """Run a member of a generation to its end. Returns the process's exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.update(request.environment)
    run_dir = Path(request.run_dir)
    console = Console.redirect(run_dir / FILE_TORCHRUN_LOG)
    try:
        _run_torchrun(request, console)
    except ChildFailedError as error:
        exit_codes = {failure.local_rank: failure.exitcode for failure in error.failures.values()}
        LauncherEnded(exit_codes=exit_codes).write_if_possible(run_dir / FILE_LAUNCHER)
        return 1
    except BaseException as error:
        # Whatever the error, the agent turns it into the failure that the user sees.
        ended = LauncherEnded(exception=type(error).__qualname__, message=str(error))
        ended.write_if_possible(run_dir / FILE_LAUNCHER)
        return 1
    LauncherEnded().write_if_possible(run_dir / FILE_LAUNCHER)
    return 0


def _end_ranks_within(seconds: float) -> None:
    """Make torchrun kill ranks that SIGTERM doesn't end so long after another rank has failed.

    It reports the failed one after that. By itself it waits 30 s for a rank inside a collective, which runs no
    handler of the signal.
    """
    from torch.multiprocessing.spawn import ProcessContext

    join = ProcessContext._join_procs_with_timeout

    def join_soon(self: ProcessContext, timeout: float) -> None:
        join(self, min(timeout, seconds))

    ProcessContext._join_procs_with_timeout = join_soon  # type: ignore[method-assign]


def launch_config(torchrun_arguments: Sequence[str]) -> LaunchConfig:
    """What torchrun makes of its command line, as on a machine without GPUs.

    It would count the GPUs. Without NVML, or with devices that NVML can't count (`CUDA_VISIBLE_DEVICES=MIG-…`), it
    would ask the CUDA runtime, and no fork of this process, such as a rank, could use CUDA any more. If it found as
    many as ranks, it would bind each rank to its GPU's NUMA node, for which the rank makes a CUDA context before the
    writer is forked from it.
    """
    from torch.distributed import run

    with _without_gpus():
        config, _, _ = run.config_from_args(run.get_args_parser().parse_args(list(torchrun_arguments)))
    return config


@contextmanager
def _without_gpus() -> Iterator[None]:
    """Hide the GPUs from torch, which then counts none without asking NVML or the CUDA runtime."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_torchrun(request: LaunchRequest, console: Console) -> None:
    from torch.distributed.launcher.api import elastic_launch

    config = launch_config(request.torchrun_arguments)
    _end_ranks_within(RANKS_END_SECONDS)
    store = _serve_store(config) if config.rdzv_configs["rank"] == 0 else None
    elastic_launch(config, run_worker)(request.entrypoint, Path(request.run_dir), console)
    del store


def _serve_store(config: LaunchConfig) -> TCPStore:
    """Serve the rendezvous store on the member's address alone.

    By itself, torch would listen on all addresses. torchrun finds the store that its process serves at that port, and
    uses it.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    address, port = parse_rendezvous_endpoint(config.rdzv_endpoint, -1)
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=bind(address, port).detach(),
    )
