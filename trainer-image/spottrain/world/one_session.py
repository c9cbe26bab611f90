"""A session belongs to the process that torchrun, the agent or the user started.

Its children inherit the rank's environment. One that opened a session would join the run as a second rank of the same
number: peers would wait for the wrong one, and its fence would end the rank's commits.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from multiprocessing import spawn
from types import FrameType

from spottrain.world.failures import UserError

# Set while a session is open, so that children find it in their environment: the rank's process.
_ENV_OWNER = "SPOTTRAIN_SESSION_PROCESS"


def refuse_in_child() -> None:
    """Refuse to open a session in a child of a rank. Raises UserError."""
    if _runs_main_module_again():
        raise UserError(
            "this process was started by multiprocessing (spawn or forkserver), which runs the script again, and a "
            "session belongs to the process that started it; put what the script does under "
            'if __name__ == "__main__":, or let data workers fork (loader={"multiprocessing_context": "fork"})'
        )
    owner = os.environ.get(_ENV_OWNER, "")
    if owner not in ("", str(os.getpid())) and _is_alive(int(owner)):
        raise UserError(
            f"this process was started by a rank (process {owner}) that has a session open, and a session belongs to "
            "the process that torchrun, the agent or you have started; open none in its children"
        )


@contextlib.contextmanager
def owned_by_this_process() -> Iterator[None]:
    """Let children know, while the block runs, that this process has the session."""
    os.environ[_ENV_OWNER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(_ENV_OWNER, None)


def _runs_main_module_again() -> bool:
    """Whether a child by spawn or forkserver is importing the parent's main module, as a function of theirs does."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == spawn.__file__ and frame.f_code.co_name.startswith("_fixup_main"):
            return True
        frame = frame.f_back
    return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
