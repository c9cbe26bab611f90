"""Runs the user's program in a forked worker.

It looks the same as `python script.py`. The program has its own `__main__`, sys.argv and sys.path[0], default signal
handlers and fresh random state. Exit codes and tracebacks are as usual, and at the end the worker waits for exit
handlers and threads.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from spottrain_agent.records import WorkerEnded, WorkerStarted, worker_ended_file, worker_started_file
from spottrain_agent.script import opens_session
from spottrain_agent.stacks import stack_file, write_stacks_on_signal
from spottrain_agent.threads import use_threads
from spottrain_api.settings.entrypoint import Entrypoint
from spottrain_runtime.processes import die_with_parent
from spottrain_runtime.wording import place_of, sentence_of, traceback_tail

_MACHINERY = frozenset({__file__, runpy.__file__, "<frozen runpy>"})
_MAX_MESSAGE_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class Console:
    """The pod's stdout and stderr, kept for the workers while torchrun itself writes to a file.

    torchrun reports a failed worker with tracebacks of its own process handling. A member whose peers end first
    reports tracebacks of the rendezvous store. In the pod's log, these would bury the script's own words.
    """

    stdout: int
    stderr: int

    @classmethod
    def redirect(cls, path: Path) -> Self:
        """Make this process write to the file at `path` from now on."""
        console = cls(os.dup(1), os.dup(2))
        with path.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        return console

    def restore(self) -> None:
        os.dup2(self.stdout, 1)
        os.dup2(self.stderr, 2)


def run_worker(entrypoint: Entrypoint, run_dir: Path, console: Console) -> None:
    """Run the program to its end. Returns only if it ended with exit code 0."""
    local_rank = int(os.environ["LOCAL_RANK"])
    console.restore()
    _reset_inherited_state()
    started = WorkerStarted(pid=os.getpid(), started_at=datetime.now(UTC), expects_session=opens_session(entrypoint))
    started.write(run_dir / worker_started_file(local_rank))
    if started.expects_session:
        _start_writer()
    use_threads()
    write_stacks_on_signal(run_dir / stack_file(local_rank))
    ended = _run_as_main(entrypoint)
    if os.getpid() != started.pid:  # the script has forked a process, whose end isn't the rank's
        _finish()
        os._exit(ended.exit_code)
    if ended.exit_code == 0:
        _finish()
        ended.write_if_possible(run_dir / worker_ended_file(local_rank))
        return
    # Report a failure at once: exit handlers of a broken job may hang on peers that are gone.
    ended.write_if_possible(run_dir / worker_ended_file(local_rank))
    _finish()
    os._exit(ended.exit_code)


def _start_writer() -> None:
    """Fork the writer before the script runs.

    There are no threads and no CUDA context yet, which a fork would break.
    """
    try:
        from spottrain.checkpoint.saving.writer import start_writer  # the zygote has imported it
    except ImportError:
        return  # the script reports that itself
    start_writer()


def _reset_inherited_state() -> None:
    """Undo what a fork inherits from launcher and zygote.

    A new interpreter wouldn't have it. It would have the exit handlers: they are of modules, such as multiprocessing.
    """
    launcher = multiprocessing.parent_process()
    die_with_parent(launcher.pid if launcher is not None else None)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _run_as_main(entrypoint: Entrypoint) -> WorkerEnded:
    if entrypoint.working_dir:
        os.chdir(entrypoint.working_dir)
    program = entrypoint.module or entrypoint.script or ""
    sys.argv = [program, *entrypoint.args]
    try:
        if entrypoint.module:
            sys.path[0] = os.getcwd()
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(program).resolve().parent)
            runpy.run_path(program, run_name="__main__")
    except SystemExit as request:
        return WorkerEnded(exit_code=_exit_code(request))
    except BaseException as error:
        return _uncaught(error)
    return WorkerEnded(exit_code=0)


def _exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _uncaught(error: BaseException) -> WorkerEnded:
    error.__traceback__ = _of_the_script(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    message = sentence_of(error)[:_MAX_MESSAGE_LENGTH]
    place = place_of(error)
    return WorkerEnded(
        exit_code=128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1,
        exception=f"{type(error).__module__}.{type(error).__qualname__}",
        message=f"{message} ({place})" if place else message,
        traceback=traceback_tail(error.__traceback__),
    )


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _MACHINERY:
        trace = trace.tb_next
    return trace


def _finish() -> None:
    """Do what the interpreter does at its end, in the same order. The fork then leaves by os._exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # If a stream can't be flushed any more, that doesn't change how the program ended.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
