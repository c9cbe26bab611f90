"""Keeps one container of a pod in the state that the pod's spec requests."""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from spottrain_local.node.api import UNREACHABLE, ApiError, JSONObject
from spottrain_local.node.cluster_objects import ObjectSource
from spottrain_local.node.config import NodeConfig
from spottrain_local.node.containers import (
    ContainerConfigError,
    ContainerInput,
    ContainerRecord,
    ContainerRun,
    ContainerRuntime,
    HostCommand,
    ImageError,
    PodSandbox,
    Running,
    RunningContainer,
    StartError,
    StreamSessions,
    Terminated,
    Waiting,
)
from spottrain_local.node.downward import PodPlace
from spottrain_local.node.environment import build_environment, expand
from spottrain_local.node.events import EventRecorder
from spottrain_local.node.limits import container_limits
from spottrain_local.node.probes import HandlerTarget, probe_forever, run_handler
from spottrain_local.node.restarts import Backoff, restarts
from spottrain_local.node.shim import timestamp
from spottrain_local.node.tasks import background, until
from spottrain_local.node.termination_message import termination_message
from spottrain_local.node.usage import Usage
from spottrain_local.node.volumes import PodVolumes

logger = logging.getLogger(__name__)

CONFIG_RETRY_SECONDS = 1.0
ERR_IMAGE_PULL = "ErrImagePull"


@dataclass(slots=True, kw_only=True)
class PodContext:
    """The context that a pod's containers share.

    `pod` is the newest version of the API object.
    """

    pod: JSONObject
    config: NodeConfig
    place: PodPlace
    sandbox: PodSandbox
    directory: Path
    volumes: PodVolumes
    source: ObjectSource
    runtime: ContainerRuntime
    events: EventRecorder
    changed: Callable[[], None]
    sessions: StreamSessions = field(default_factory=StreamSessions)

    @property
    def restart_policy(self) -> str:
        """The pod's restart policy."""
        return str(self.pod["spec"].get("restartPolicy", "Always"))

    @property
    def grace_seconds(self) -> float:
        """The pod's grace period."""
        grace = self.pod["spec"].get("terminationGracePeriodSeconds")
        return 30.0 if grace is None else float(grace)

    def container_directory(self, name: str) -> Path:
        """Return the folder of a container's logs and records."""
        return self.directory / "c" / name


class ContainerWorker:
    """Starts a container, probes it, restarts it, and stops it."""

    def __init__(self, context: PodContext, spec: JSONObject, record: ContainerRecord) -> None:
        self._context = context
        self._spec = spec
        self.record = record
        self._directory = context.container_directory(record.name)
        self._backoff = Backoff(
            base_seconds=context.config.crash_loop_seconds, max_seconds=context.config.crash_loop_max_seconds
        )
        self._pull_backoff = Backoff(
            base_seconds=context.config.crash_loop_seconds, max_seconds=context.config.crash_loop_max_seconds
        )
        self.has_started = asyncio.Event()
        self._stopping = asyncio.Event()
        self._starting = asyncio.Lock()
        self._container: RunningContainer | None = None
        self._run: ContainerRun | None = None
        self._target: HandlerTarget | None = None
        self._ended = asyncio.Event()
        self._ended.set()
        self._exec_count = 0

    async def run(self) -> None:
        """Run the container until it is done or stopped.

        It restarts if the policy says so.
        """
        ended, ran_seconds = self._already_ended(), 0.0
        while True:
            if ended:
                if self._stopping.is_set() or not restarts(self._context.restart_policy, self.record.kind, ended):
                    return
                await self._back_off(ended, ran_seconds)
            if self._stopping.is_set():
                return
            number = self.record.restart_count + (1 if ended else 0)
            started = time.monotonic()
            ended = await self._run_once(number)
            ran_seconds = time.monotonic() - started

    def running(self) -> ContainerRun:
        """Return the run of the container that runs.

        Raises:
            LookupError: It does not run; the text says why.
        """
        if self._run is not None:
            return self._run
        match self.record.state:
            case Terminated(reason=reason, exit_code=code):
                raise LookupError(f'container "{self.record.name}" has ended: {reason}, exit code {code}')
            case Waiting(reason=reason):
                raise LookupError(f'container "{self.record.name}" is waiting to start: {reason}')
        raise LookupError(f'container "{self.record.name}" is just starting')

    def usage(self) -> Usage | None:
        """Return what the container uses, or None if it does not run."""
        container = self._container
        return container.usage() if container else None

    def _already_ended(self) -> Terminated | None:
        """Record how the container ended under an earlier node process."""
        if isinstance(self.record.state, Terminated):
            return self.record.state
        return self.record.last if isinstance(self.record.state, Waiting) else None

    async def _back_off(self, ended: Terminated, ran_seconds: float) -> None:
        delay = self._backoff.delay(ran_seconds)
        self.record.last = ended
        if delay:
            name = self._context.pod["metadata"]["name"]
            message = f"back-off {delay:g}s restarting failed container={self.record.name} pod={name}"
            self._event("Warning", "BackOff", f"Back-off restarting failed container {self.record.name}")
            self._set(Waiting(reason="CrashLoopBackOff", message=message))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()
            if self._stopping.is_set():
                self._set(ended)

    async def _run_once(self, number: int) -> Terminated | None:
        """Run the container to its end; None if it is stopped before its start.

        Until the start, the record is that of the run before, whose log is the newest.
        """
        run = await self._configured(number)
        async with self._starting:
            if run is None or self._stopping.is_set():
                return None
            self.record.container_id = run.container_id
            try:
                self._container = await self._context.runtime.start(run)
            except (StartError, OSError) as error:
                self._event("Warning", "Failed", f"Error: {error}")
                now = timestamp()
                ended = Terminated(
                    exit_code=128, reason="StartError", message=str(error), started_at=now, finished_at=now
                )
                self.record.restart_count = number
                self._set(ended)
                return ended
            self._ended.clear()
            self._run = run
        self.record.restart_count = number
        self._set(Running(started_at=timestamp()))
        self._event("Normal", "Started", f"Started container {self.record.name}")
        ended = await self._until_end(self._container)
        message = await asyncio.to_thread(termination_message, self._spec, run, ended)
        ended = replace(ended, message=ended.message or message)
        self._set(ended)
        self._container = self._run = None
        self._context.sessions.end(self.record.name)
        self._ended.set()
        return ended

    async def _until_end(self, container: RunningContainer) -> Terminated:
        async with background(self._watch_health(container)):
            return await container.wait()

    def _set(self, state: Waiting | Running | Terminated) -> None:
        self.record.state = state
        if not isinstance(state, Running):
            self.record.started = self.record.ready = False
        self._context.changed()

    def _event(self, kind: str, reason: str, message: str) -> None:
        self._context.events.record(self._context.pod, "Warning" if kind == "Warning" else "Normal", reason, message)

    # -- configuration ------------------------------------------------------------------------------------

    async def _configured(self, number: int) -> ContainerRun | None:
        """Wait until run `number` can be started; None if it is stopped before.

        While it waits, the container's state has the reason.
        """
        while not self._stopping.is_set():
            try:
                run = await self._container_run(number)
                await self._context.runtime.prepare(run)
                return run
            except ContainerConfigError as error:
                reason, message = "CreateContainerConfigError", str(error)
            except ImageError as error:
                reason, message = error.reason, str(error)
            except (ApiError, *UNREACHABLE) as error:
                reason, message = "CreateContainerConfigError", f"The container cannot be prepared: {error}"
            await self._wait_as(reason, message, CONFIG_RETRY_SECONDS)
            if reason == ERR_IMAGE_PULL:
                image = self._spec.get("image", "")
                delay = self._pull_backoff.delay(0)
                text = f'Back-off pulling image "{image}": {ERR_IMAGE_PULL}: {message}'
                await self._wait_as("ImagePullBackOff", text, delay)
        return None

    async def _wait_as(self, reason: str, message: str, seconds: float) -> None:
        if self.record.state != Waiting(reason=reason, message=message):
            self._event("Warning", "Failed", f"Error: {message}")
            self._set(Waiting(reason=reason, message=message))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _container_run(self, number: int) -> ContainerRun:
        context, spec = self._context, self._spec
        self._directory.mkdir(parents=True, exist_ok=True)
        termination = self._directory / "termination"
        termination.write_bytes(b"")
        termination.chmod(0o666)
        self._forget_runs_before(number - 1)
        env = await build_environment(
            context.pod, spec, config=context.config, place=context.place, source=context.source
        )
        run = ContainerRun(
            pod=context.sandbox,
            name=self.record.name,
            image=spec.get("image", ""),
            pull_policy=spec.get("imagePullPolicy") or "IfNotPresent",
            command=tuple(expand(text, env) for text in spec.get("command") or ()),
            args=tuple(expand(text, env) for text in spec.get("args") or ()),
            env=env,
            working_dir=spec.get("workingDir") or "",
            mounts=context.volumes.mounts(spec, self._directory, context.config.pod_env),
            limits=container_limits(context.pod, spec),
            input=ContainerInput(
                stdin=bool(spec.get("stdin")), once=bool(spec.get("stdinOnce")), tty=bool(spec.get("tty"))
            ),
            log_path=self._directory / f"{number}.log",
            directory=self._directory / str(number),
            container_id=f"{context.config.runtime}://{context.pod['metadata']['uid']}/{self.record.name}/{number}",
        )
        self._target = self._handler_target(run)
        return run

    def _forget_runs_before(self, number: int) -> None:
        for path in self._directory.iterdir():
            if path.stem.split(".")[0].isdigit() and int(path.stem.split(".")[0]) < number:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _handler_target(self, run: ContainerRun) -> HandlerTarget:
        async def execute(command: Sequence[str], timeout: float) -> tuple[int, str]:
            self._exec_count += 1
            directory = self._directory / f"exec-{self._exec_count}"
            try:
                runtime = self._context.runtime
                return await run_command(runtime, runtime.exec_command(run, command), directory, timeout)
            finally:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

        ports = {p["name"]: p["containerPort"] for p in self._spec.get("ports") or [] if p.get("name")}
        return HandlerTarget(pod_ip=self._context.place.pod_ip, ports=ports, execute=execute)

    # -- health -------------------------------------------------------------------------------------------

    async def _watch_health(self, container: RunningContainer) -> None:
        """Run the post-start hook and the startup probe, then the other two probes.

        Those are the liveness probe and the readiness probe.
        """
        assert self._target is not None
        hook = (self._spec.get("lifecycle") or {}).get("postStart")
        if hook:
            outcome = await run_handler(hook, self._target, 600)
            if not outcome.ok:
                self._event("Warning", "FailedPostStartHook", f"PostStartHook failed: {outcome.message}")
                await self._end(container, self._context.grace_seconds)
                return
        if probe := self._spec.get("startupProbe"):
            await probe_forever(probe, self._target, self._startup_verdict, eager=True)
            if not self.record.started:
                await self._kill_unhealthy(container, "startup", probe)
                return
        self.record.started = True
        self.has_started.set()
        readiness, liveness = self._spec.get("readinessProbe"), self._spec.get("livenessProbe")
        self.record.ready = readiness is None
        self._context.changed()
        async with asyncio.TaskGroup() as group:
            if readiness:
                group.create_task(probe_forever(readiness, self._target, self._readiness_verdict, eager=True))
            if liveness:
                group.create_task(self._watch_liveness(container, liveness))

    async def _startup_verdict(self, ok: bool, message: str) -> bool:
        if not ok:
            self._event("Warning", "Unhealthy", f"Startup probe failed: {message}")
        self.record.started = ok
        return False

    async def _readiness_verdict(self, ok: bool, message: str) -> bool:
        if not ok:
            self._event("Warning", "Unhealthy", f"Readiness probe failed: {message}")
        if self.record.ready != ok:
            self.record.ready = ok
            self._context.changed()
        return True

    async def _watch_liveness(self, container: RunningContainer, probe: JSONObject) -> None:
        async def verdict(ok: bool, message: str) -> bool:
            if not ok:
                self._event("Warning", "Unhealthy", f"Liveness probe failed: {message}")
            return ok

        assert self._target is not None
        await probe_forever(probe, self._target, verdict)
        await self._kill_unhealthy(container, "liveness", probe)

    async def _kill_unhealthy(self, container: RunningContainer, kind: str, probe: JSONObject) -> None:
        grace = probe.get("terminationGracePeriodSeconds")
        self._event("Normal", "Killing", f"Container {self.record.name} failed {kind} probe, will be restarted")
        await self._end(container, self._context.grace_seconds if grace is None else grace)

    async def _end(self, container: RunningContainer, grace_seconds: float) -> None:
        container.terminate()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._ended.wait()
        except TimeoutError:
            container.kill()

    # -- stopping -----------------------------------------------------------------------------------------

    async def stop(self, kill: asyncio.Event) -> None:
        """Stop the container for good: preStop hook, SIGTERM, then SIGKILL.

        SIGKILL follows as soon as `kill` is set.
        """
        self._stopping.set()
        async with self._starting:
            container = self._container
        if container is None:
            return
        self._event("Normal", "Killing", f"Stopping container {self.record.name}")
        hook = (self._spec.get("lifecycle") or {}).get("preStop")
        if hook and self._target:
            await until(kill, run_handler(hook, self._target, 86400))
        container.terminate()
        await until(kill, self._ended.wait())
        if not self._ended.is_set():
            container.kill()
            await self._ended.wait()


async def run_command(
    runtime: ContainerRuntime, command: HostCommand, directory: Path, timeout: float
) -> tuple[int, str]:
    """Run a command in a container.

    Returns:
        Its exit code, and the end of its output.
    """
    try:
        container = await runtime.execute(command, directory)
    except StartError as error:
        return 128, str(error)
    waiting = asyncio.ensure_future(container.wait())
    try:
        async with asyncio.timeout(timeout):
            ended = await asyncio.shield(waiting)
    except (TimeoutError, asyncio.CancelledError):
        container.kill()
        await waiting
        raise
    log = directory / "log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return ended.exit_code, "\n".join(line.split(" ", 3)[-1] for line in lines[-20:])
