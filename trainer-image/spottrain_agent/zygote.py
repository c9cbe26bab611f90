"""The zygote: an interpreter with torch imported, from which each generation's torchrun is forked.

Plain torchrun imports torch once in its own process and once more in every worker. On a machine on which several
members start together, that is most of the time between two generations. The zygote imports torch when the pod
starts, and a generation starts with a fork: launcher.py runs torchrun in the fork, and its workers are forks again.

A fork is only safe from a process without threads and without a CUDA context, so nothing here may compute.

Protocol: JSON lines on the socket whose descriptor is the only argument. The zygote sends `{"warm": true}` once
(or `{"error": …}`, and ends). Then it answers each `LaunchRequest` with `{"pid": …}`, a child of the agent.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from spottrain_agent.launcher import LaunchRequest, run_launcher
from spottrain_runtime.processes import die_with_parent
from spottrain_runtime.wording import one_line

REQUIRED_MODULES = ("torch", "torch.distributed.run", "torch.distributed.elastic.multiprocessing")
# What nearly every training script imports. The first optimizer imports torch._dynamo.
PRELOADED_MODULES = (
    "numpy",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.profiler._cupti_monitor",
    "torch.utils.data",
    "spottrain",
    "spottrain.checkpoint.stores.s3_storage",
)
MAX_PID_BYTES = 20


def _send(channel: socket.socket, **message: object) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _preload(channel: socket.socket) -> None:
    for name in REQUIRED_MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken torch may raise anything
            why = one_line(str(error))
            _send(channel, error=f"The image's Python can't import {name}: {why}. Install torch in the image.")
            raise SystemExit(1) from None
    preload(PRELOADED_MODULES)


def preload(names: Sequence[str]) -> None:
    """Import the modules that are there. One that can't be imported is reported."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            pass  # not every image, and not every release of torch, has all of them
        except Exception as error:  # a broken library may raise anything
            # The script that needs it reports that itself, perhaps much later.
            print(f"spottrain: not preloaded: {name} ({error})", file=sys.stderr)


def _fork_launcher(channel: socket.socket, request: LaunchRequest, agent: int) -> None:
    """Fork twice, so that the launcher's parent is the agent.

    Only the agent watches and reaps it. If a fork fails, the zygote ends, and the agent asks the next one. Once the
    agent has the answer, it may kill all but the zygote. So the process in the middle is gone by then, and how it
    ended doesn't matter.
    """
    reading, writing = os.pipe()
    middle = os.fork()
    if middle:
        os.close(writing)
        pid = os.read(reading, MAX_PID_BYTES)
        os.close(reading)
        os.waitpid(middle, 0)
        if not pid:
            raise SystemExit(1)
        _send(channel, pid=int(pid))
        return
    middle = os.getpid()
    try:
        launcher = os.fork()
        if launcher:
            os.write(writing, str(launcher).encode())
            os._exit(0)
    except OSError as error:
        print(f"spottrain: the generation's processes can't be started: {error}", file=sys.stderr)
        os._exit(1)
    for descriptor in (reading, writing):
        os.close(descriptor)
    channel.close()
    _become_launcher(request, agent, former_parent=middle)


def _become_launcher(request: LaunchRequest, agent: int, former_parent: int) -> NoReturn:
    exit_code = 1
    try:
        while os.getppid() == former_parent:
            time.sleep(0.001)
        die_with_parent(agent)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exit_code = run_launcher(request)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def main(descriptor: int) -> None:
    agent = os.getppid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    # A search for garbage among the imports takes a third of the time, and finds next to nothing.
    gc.disable()
    _preload(channel)
    # Move everything to the permanent generation, so that collections in the forks don't copy its pages.
    gc.freeze()
    gc.enable()
    _send(channel, warm=True)
    with channel.makefile("rb") as requests:
        for line in requests:
            _fork_launcher(channel, LaunchRequest.from_json(line), agent)


if __name__ == "__main__":
    main(int(sys.argv[1]))
