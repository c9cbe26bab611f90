"""Child processes of the supervisor.

They die with it, and it restarts those that end by themselves.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from spottrain_runtime.processes import die_with_parent

logger = logging.getLogger(__name__)

FIRST_RESTART_SECONDS = 0.5
LONGEST_RESTART_SECONDS = 20.0
# Seconds after which a process is not in a crash loop.
STEADY_SECONDS = 30.0
# Logs are truncated when a process starts, so that many starts do not fill the disk.
LOG_BYTES = 20 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A program to keep running.

    `stop_seconds` is the time between SIGTERM and SIGKILL; 0 means SIGKILL at once.

    If `main` is set, a fork of this process runs that function instead of `argv`, so that it need not load again what
    this process has loaded. The function returns the exit code.
    """

    name: str
    argv: Sequence[str | Path] = (sys.executable,)
    main: Callable[[], int] | None = None
    log_file: Path
    env: Mapping[str, str] = field(default_factory=dict)
    stop_seconds: float = 5.0


class ChildProcess:
    """Keeps one program running until `stop`."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, or None while it does not run."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process and running else None

    @property
    def started(self) -> bool:
        """Whether it is to run. It may be between two starts."""
        return self._keeper is not None

    def start(self) -> None:
        """Start the program, restart it whenever it ends, and return at once."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_running(), name=f"keep {self.spec.name}")

    async def stop(self, *, kill: bool = False) -> None:
        """End the program for good; with `kill` at once, by SIGKILL."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeper
        self._keeper = None
        process = self._process
        if process is None or process.returncode is not None:
            return
        if not kill and self.spec.stop_seconds:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.spec.stop_seconds):
                    await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()

    async def _keep_running(self) -> None:
        delay = FIRST_RESTART_SECONDS
        while True:
            started = time.monotonic()
            outcome = await self._run_once()
            if time.monotonic() - started > STEADY_SECONDS:
                delay = FIRST_RESTART_SECONDS
            logger.warning(
                "%s %s; restarting it in %.1f s; see %s",
                self.spec.name,
                outcome,
                delay,
                self.spec.log_file,
            )
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_RESTART_SECONDS)
            self.restarts += 1

    async def _run_once(self) -> str:
        """Run the program to its end, and return how that came."""
        try:
            self._process = await start_process(self.spec)
        except OSError as error:
            return f"could not be started ({error})"
        code = await self._process.wait()
        return f"ended by itself ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def watch_children_by_pidfd() -> None:
    """Make asyncio wait for children without threads.

    A fork beside threads is not safe. Python 3.12 does so by itself.
    """
    if sys.version_info < (3, 12):
        asyncio.set_event_loop_policy(None)  # In a fork, the parent's policy has a watcher of the parent's children.
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())


async def start_process(spec: ProcessSpec) -> asyncio.subprocess.Process:
    """Start a program whose life ends with this process, even if that is killed."""
    parent = os.getpid()

    def begin() -> None:
        die_with_parent(parent)
        if spec.main:
            os.environ.update(spec.env)
            _run_in_fork(spec.main)

    spec.log_file.parent.mkdir(parents=True, exist_ok=True)
    if spec.log_file.exists() and spec.log_file.stat().st_size > LOG_BYTES:
        spec.log_file.replace(spec.log_file.with_suffix(".old.log"))
    with spec.log_file.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *spec.argv,
            env={**os.environ, **spec.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=begin,
            # Ctrl-C in the terminal of `up` must not reach them.
            start_new_session=True,
        )


def _run_in_fork(main: Callable[[], int]) -> NoReturn:
    """Run a function as if it were a program of its own, and end with it."""
    # No object of the parent may be collected here: it would close a descriptor that is in use again by then.
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # As in every Python program, a peer that hangs up is an error to handle. subprocess resets that for the program
    # that it expects to execute.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    # This also closes the pipe on which the parent waits for the program to start. Do not use asyncio before: the
    # parent's loop polls through a descriptor that both processes have.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(descriptor)
    watch_children_by_pidfd()
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
