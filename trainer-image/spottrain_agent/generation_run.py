"""One generation on this member: start, watch, drain and kill its processes."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
import time
from datetime import UTC, datetime
from importlib.machinery import all_suffixes
from pathlib import Path

from spottrain_agent import worker
from spottrain_agent.launcher import RANKS_END_SECONDS, LaunchRequest, torchrun_arguments
from spottrain_agent.ports import interface_of
from spottrain_agent.processes import Reaper, is_alive, send_signal
from spottrain_agent.run_directory import RunDirectory
from spottrain_agent.settings import AgentSettings
from spottrain_agent.stacks import STACK_SIGNAL, script_first, stack_file, stacks_of_forks, written
from spottrain_agent.threads import ENV_THREADS, share_of_quota
from spottrain_agent.verdict import GenerationObservation, RankObservation
from spottrain_agent.zygote_process import ZygoteProcess
from spottrain_api.contract import names
from spottrain_api.contract.assignments import GenerationAssignment
from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.reports import Failure, FailureReason, Progress
from spottrain_api.settings.entrypoint import Entrypoint

logger = logging.getLogger(__name__)

# After a worker has disappeared, torchrun gets this long to report its exit code. It looks every 0.1 s, or later on a
# busy machine, and a rank that was killed must not count as one that has succeeded.
SETTLE_SECONDS = 10.0
# While other local ranks live, torchrun ends those first: it sends SIGTERM, and then SIGKILL.
SETTLE_BESIDE_OTHERS_SECONDS = SETTLE_SECONDS + RANKS_END_SECONDS
RENDEZVOUS_STORE_TIMEOUT_SECONDS = 20.0
RENDEZVOUS_STORE_RETRY_SECONDS = 0.01
# By default, gloo listens on the address of the machine's name.
_ENV_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# A script that hasn't opened a session of the library after this long gets SIGTERM for a drain.
UNDECLARED_SECONDS = 5.0
# SIGTERM is sent after this share of the time until the deadline at the latest.
UNDECLARED_SHARE = 0.25


def missing_entrypoint(entrypoint: Entrypoint) -> Failure | None:
    """Why the program can't be run from the image, found before any process starts. None if it may be there."""
    try:
        message = _what_is_missing(entrypoint)
    except OSError as error:
        message = (
            f"entrypoint: the pod's user (uid {os.getuid()}) can't reach {error.filename}: {error.strerror}. Correct "
            "the path, or make the file and its folders readable for that user. The folder /root usually is not."
        )
    return Failure(reason=FailureReason.ENTRYPOINT_NOT_FOUND, message=message) if message else None


def _what_is_missing(entrypoint: Entrypoint) -> str | None:
    """A sentence about what is not there. Raises OSError."""
    base = Path(entrypoint.working_dir or ".")
    if entrypoint.working_dir and not base.is_dir():
        return (
            f"entrypoint.workingDir: folder {entrypoint.working_dir} does not exist in the image"
            f" (looked for {base.resolve()}). Correct the path, or add the folder to the image. "
            "A local cluster has no images: there the folder is on your machine."
        )
    if entrypoint.script and not (base / entrypoint.script).is_file():
        return (
            f"entrypoint.script: file {entrypoint.script} does not exist in the image"
            f" (looked in {base.resolve()}). Correct the path, or add the file to the image. "
            "A local cluster has no images: there the file is on your machine."
        )
    if entrypoint.module and not _has_module(entrypoint.module, base):
        return (
            f"entrypoint.module: Python finds no module {entrypoint.module} in the image. "
            "Correct the name, or install it in the image."
        )
    return None


def _has_module(name: str, base: Path) -> bool:
    """Whether a module may exist.

    Python imports a module's packages to find it. This looks at their files only, and takes a package that sets its
    own `__path__` to have all submodules.
    """
    top, *parts = name.split(".")
    if not top:
        return False
    spec = importlib.util.find_spec(top)
    if spec is None and not _is_in(base, top):
        return False
    installed = [Path(each) for each in (spec and spec.submodule_search_locations) or ()]
    if not all(folder.is_dir() for folder in installed):  # in an archive, or where an import hook says
        return True
    folders = [base / top, *installed]
    for part in parts:
        if any(_sets_path(folder / "__init__.py") for folder in folders):
            return True
        if not any(_is_in(folder, part) for folder in folders):
            return False
        folders = [folder / part for folder in folders]
    return True


def _is_in(folder: Path, name: str) -> bool:
    """Whether a folder has a package or a module of that name."""
    return (folder / name).is_dir() or any((folder / f"{name}{suffix}").is_file() for suffix in all_suffixes())


def _sets_path(file: Path) -> bool:
    return file.is_file() and b"__path__" in file.read_bytes()


async def wait_for_rendezvous_store(endpoint: str) -> None:
    """Wait until the store's host listens. After RENDEZVOUS_STORE_TIMEOUT_SECONDS, leave the wait to torchrun.

    torch's own client sleeps for half a second or more after each refused connection. In a recovery that takes a
    second, that is most of the time.
    """
    host, _, port = endpoint.rpartition(":")
    give_up_at = time.monotonic() + RENDEZVOUS_STORE_TIMEOUT_SECONDS
    while time.monotonic() < give_up_at:
        try:
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            await asyncio.sleep(RENDEZVOUS_STORE_RETRY_SECONDS)
            continue
        writer.close()
        return


class GenerationRun:
    """The processes of one generation on this member, and the directory that it shares with them."""

    def __init__(self, assignment: GenerationAssignment, settings: AgentSettings, grace_seconds: float) -> None:
        self.assignment = assignment
        self.directory = RunDirectory(settings.run_root, assignment.number)
        self._settings = settings
        self._grace_seconds = grace_seconds
        self._launcher: asyncio.Future[int] | None = None
        self._ranks_seen: tuple[tuple[RankObservation, ...], float] = ((), time.monotonic())
        self._step_seen: tuple[int, float] = (-1, time.monotonic())
        self._drain: DrainRequest | None = None
        self._drain_asked_at = 0.0
        self._drain_is_written = True
        self._at_risk = False
        self._terminated: set[int] = set()

    async def start(self, zygote: ZygoteProcess, reaper: Reaper) -> None:
        """Start torchrun. Raises LaunchFailed."""
        self.directory.create(self.assignment.trainer)
        if self._drain is not None:
            self.directory.write_drain(self._drain)
        request = LaunchRequest(
            torchrun_arguments=torchrun_arguments(self.assignment, self._settings.pod_ip, self.directory.path),
            environment=self._environment(),
            entrypoint=self.assignment.entrypoint,
            run_dir=str(self.directory.path),
        )
        command = (*request.torchrun_arguments, *request.entrypoint.args)
        logger.info("generation %d: torchrun %s", self.assignment.number, " ".join(command))
        if self.assignment.node_rank != 0:
            await wait_for_rendezvous_store(self.assignment.rendezvous_endpoint)
        self._launcher = reaper.ended(await zygote.launch(request))

    def _environment(self) -> dict[str, str]:
        environment = {
            names.ENV_RUN_DIR: str(self.directory.path),
            names.ENV_DRAIN_FILE: str(self.directory.drain_file),
            names.ENV_GRACE_SECONDS: f"{self._grace_seconds:g}",
        }
        interface = interface_of(self._settings.pod_ip)
        if interface is not None and _ENV_GLOO_INTERFACE not in os.environ:
            environment[_ENV_GLOO_INTERFACE] = interface
        own = os.environ.get(ENV_THREADS)
        environment[ENV_THREADS] = own or str(share_of_quota(self.assignment.processes_per_node))
        return environment

    # --- drain -------------------------------------------------------------------------------------------

    def request_drain(self, request: DrainRequest) -> None:
        self._drain = request
        self._drain_asked_at = time.monotonic()
        if self.directory.path.is_dir():
            try:
                self.directory.write_drain(request)
                self._drain_is_written = True
            except OSError as error:
                logger.warning("the ranks get SIGTERM, as drain.json can't be written: %s", error)
                self._drain_is_written = False

    def cancel_drain(self) -> None:
        self._drain = None
        self.directory.remove_drain()

    def show_risk(self, at_risk: bool) -> None:
        """Report to the ranks whether the node may be taken back soon."""
        if at_risk != self._at_risk and self.directory.path.is_dir():
            self._at_risk = at_risk
            try:
                self.directory.show_risk(at_risk)
            except OSError as error:
                logger.warning("the ranks don't learn that the node is at risk: %s", error)

    def drain_seen(self) -> bool:
        """Whether any rank acts on the drain, so that it can't be taken back."""
        return bool(self._terminated) or any(
            progress is not None and progress.drain_seen_at is not None for progress in self._all_progress()
        )

    def terminate_for_drain(self) -> None:
        """Send SIGTERM to ranks that don't read drain.json.

        If it can't be written, send it to all. The script of the former doesn't use the library, whose sessions treat
        the signal as a drain. Each worker gets it once. A rank that uses the library writes its progress when its
        session opens; a young rank gets a little time for that.
        """
        if self._drain is None:
            return
        for local_rank in range(self.assignment.processes_per_node):
            started = self.directory.worker_started(local_rank)
            if started is None or local_rank in self._terminated:
                continue
            reads_drain = self.directory.progress(local_rank) is not None
            if not self._drain_is_written or (
                not reads_drain and self._is_undeclared(started.started_at, self._drain)
            ):
                self._terminated.add(local_rank)
                if is_alive(started.pid):
                    send_signal(started.pid, signal.SIGTERM)

    def _is_undeclared(self, started_at: datetime, drain: DrainRequest) -> bool:
        now = datetime.now(UTC)
        age = (now - started_at).total_seconds()
        waited = time.monotonic() - self._drain_asked_at
        remaining = (drain.deadline - now).total_seconds()
        return age >= UNDECLARED_SECONDS or waited >= UNDECLARED_SHARE * (waited + remaining)

    # --- observation -------------------------------------------------------------------------------------

    def has_started(self) -> bool:
        """Whether all local ranks have started to run the script."""
        return all(self.directory.worker_started(r) for r in range(self.assignment.processes_per_node))

    def progress(self) -> Progress | None:
        """The newest progress of local rank 0.

        Before its session opens, this says that the rank starts, if its script is going to open one.
        """
        progress, started = self.directory.progress(0), self.directory.worker_started(0)
        if progress is None and started is not None and started.expects_session:
            return Progress(generation=self.assignment.number, updated_at=started.started_at)
        return progress

    def step_age_seconds(self) -> float:
        """Seconds since the newest step, or since the start, by this process's monotonic clock."""
        step = max((progress.step for progress in self._all_progress() if progress), default=-1)
        if step > self._step_seen[0]:
            self._step_seen = (step, time.monotonic())
        return time.monotonic() - self._step_seen[1]

    def _all_progress(self) -> list[Progress | None]:
        return [self.directory.progress(r) for r in range(self.assignment.processes_per_node)]

    def observe(self) -> GenerationObservation:
        num_local = self.assignment.processes_per_node
        ranks = tuple(self._observe_rank(local_rank) for local_rank in range(num_local))
        launcher_exit_code = self._launcher.result() if self._launcher and self._launcher.done() else None
        return GenerationObservation(
            ranks=ranks,
            launcher=self.directory.launcher_ended(),
            launcher_exit_code=launcher_exit_code,
            is_settled=self._is_settled(ranks, launcher_exit_code),
            drain_requested=self._drain is not None,
        )

    def _observe_rank(self, local_rank: int) -> RankObservation:
        started = self.directory.worker_started(local_rank)
        # First look for the process, then at its files: a worker that is gone by now has written all its files.
        alive = started is not None and is_alive(started.pid)
        return RankObservation(
            rank=self.assignment.node_rank * self.assignment.processes_per_node + local_rank,
            local_rank=local_rank,
            started=started,
            is_alive=alive,
            ended=self.directory.worker_ended(local_rank),
            outcome=self.directory.outcome(local_rank),
        )

    def _is_settled(self, ranks: tuple[RankObservation, ...], launcher_exit_code: int | None) -> bool:
        if launcher_exit_code is not None:
            return True
        # Whatever happens to one rank may be what torchrun does before it reports another.
        if ranks != self._ranks_seen[0]:
            self._ranks_seen = (ranks, time.monotonic())
        seconds = SETTLE_BESIDE_OTHERS_SECONDS if any(rank.is_alive for rank in ranks) else SETTLE_SECONDS
        waited = time.monotonic() - self._ranks_seen[1]
        return any(rank.is_unexplained for rank in ranks) and waited >= seconds

    async def log_stacks(self) -> None:
        """Log where each rank stands, before it is killed because no rank makes a step."""
        asked = []
        for local_rank in range(self.assignment.processes_per_node):
            started, path = self.directory.worker_started(local_rank), self.directory.path / stack_file(local_rank)
            if started is not None and is_alive(started.pid) and path.exists():
                send_signal(started.pid, STACK_SIGNAL)
                asked.append(self._log_stacks_of(local_rank, started.pid, path))
        await asyncio.gather(*asked)

    async def _log_stacks_of(self, local_rank: int, pid: int, path: Path) -> None:
        number = self.assignment.number
        rank = self.assignment.node_rank * self.assignment.processes_per_node + local_rank
        stacks = script_first(await written(path), worker.__file__) or "It doesn't answer: it is in the kernel."
        logger.warning("generation %d hangs; rank %d stands here:\n%s", number, rank, stacks)
        async for child, text in stacks_of_forks(pid, path):
            stacks = script_first(text, worker.__file__) or "It doesn't answer."
            logger.warning("generation %d hangs; process %d of rank %d stands here:\n%s", number, child, rank, stacks)

    def is_launcher_gone(self) -> bool:
        return self._launcher is not None and self._launcher.done()
