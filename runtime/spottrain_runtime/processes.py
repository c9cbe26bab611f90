"""Calls of the kernel for families of processes, and for what a process may open.

Agent, trainer, operator and local cluster share them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded once, here: a process that was just forked should load no library.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends.

    Args:
        parent: Process ID of the parent. If it has ended before the call, the kernel sends nothing, and this process
            ends at once. None: something else ends this process then, such as a closed connection.

    Raises:
        OSError: The kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Adopt orphaned descendants, also if this process isn't PID 1.

    Raises:
        OSError: The kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_many_files() -> None:
    """Raise the soft limit of open files to the hard one.

    It holds for this process and its children. The soft one is often 1,024. An agent that relays for 511 peers, or
    the operator of a thousand jobs, holds more connections than that.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # a sandbox may refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
