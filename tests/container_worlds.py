"""A container runtime with one pod, for tests of the runtime alone."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marked_processes import MARK
from spottrain_local.address import claim_network
from spottrain_local.node.containers import ContainerRun, ContainerRuntime, PodSandbox, RunningContainer
from spottrain_local.node.podman_runtime import NodeIdentity, PodmanRuntime
from spottrain_local.node.process_runtime import ProcessRuntime
from spottrain_local.node.shimmed_processes import ShimmedProcesses
from spottrain_local.podman import create_bridge, gateway_ip, is_network_free, remove_cluster

NODE = "n-0"


def printed(log: Path) -> list[str]:
    """The whole lines in a container's log, without their times.

    The last record may still be under way.
    """
    text = log.read_text() if log.exists() else ""
    return [record.split(" ", 3)[3] for record in text[: text.rfind("\n") + 1].splitlines()]


@dataclass(frozen=True, kw_only=True)
class World:
    """A runtime with one pod, and containers that run in it."""

    runtime: ContainerRuntime
    image: str
    pod: PodSandbox
    mark: str
    network: int

    def run(self, *command: str, name: str = "c", **more: Any) -> ContainerRun:
        run = ContainerRun(
            pod=self.pod,
            name=name,
            image=self.image,
            pull_policy="Never",
            command=command,
            env={"PATH": os.environ["PATH"], MARK: self.mark},
            log_path=self.pod.directory / f"{name}.log",
            directory=self.pod.directory / name / "0",
            container_id=f"test://u/{name}/0",
        )
        return replace(run, **more)

    async def start(self, *command: str) -> RunningContainer:
        return await self.runtime.start(self.run(*command))

    def output(self, name: str = "c") -> list[str]:
        return printed(self.pod.directory / f"{name}.log")

    async def wait_for_output(self, line: str) -> None:
        began = time.monotonic()
        while line not in self.output():
            assert time.monotonic() - began < 30, f"{line!r} was not printed"
            await asyncio.sleep(0.01)


def _pod(directory: Path, prefix: str) -> PodSandbox:
    return PodSandbox(
        uid="0123456789",
        namespace="default",
        hostname="pod-1",
        ip=f"{prefix}.1.2",
        host_network=False,
        directory=directory,
    )


@contextlib.asynccontextmanager
async def process_world(directory: Path, mark: str) -> AsyncIterator[World]:
    """A pod whose containers are processes."""
    world = World(
        runtime=ProcessRuntime(ShimmedProcesses()),
        image="none",
        pod=_pod(directory, "127.0"),
        mark=mark,
        network=0,
    )
    await world.runtime.open()
    await world.runtime.add_pod(world.pod)
    yield world


@contextlib.asynccontextmanager
async def podman_world(directory: Path, mark: str, image: str) -> AsyncIterator[World]:
    """A pod whose containers podman runs, on a bridge of its own."""
    network = claim_network(usable=is_network_free)
    number = network.number
    try:
        create_bridge(number)
        node = NodeIdentity(name=NODE, ip=f"10.{number}.1.1", network=number, gateway=gateway_ip(number))
        world = World(
            runtime=PodmanRuntime(node), image=image, pod=_pod(directory, f"10.{number}"), mark=mark, network=number
        )
        await world.runtime.open()
        await world.runtime.add_pod(world.pod)
        yield world
    finally:
        remove_cluster(number)
        network.release()
