"""One run of a scenario: the job, its agents, and what has become of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.scale.agents import NUM_STEPS, CallingAgent
from benchmarks.scale.kubelets import Kubelets

from crash_points.disturbances import Disturbance
from crash_points.proxy import ApiProxy
from spottrain_api.contract.names import API_VERSION, KIND, LABEL_CAPACITY_TYPE, LABEL_JOB, PLURAL
from spottrain_local.node.api import ApiClient, ApiError
from spottrain_simulator.ranks import Pace, Training

PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.1
NOTICE_SECONDS = 120.0
# Ranks commit as they drain, so that they resume after the step at which they stopped.
PACE = Pace(start=0.2, step=0.05, save=0.3, commit_every=NUM_STEPS)
State = dict[str, Any]


@dataclass(kw_only=True)
class Run:
    """A job in a namespace, watched by one operator.

    - agents: of the job's pods, by uid. They come and go with the pods.
    """

    job: str
    namespace: str
    client: ApiClient
    kubelets: Kubelets
    proxy: ApiProxy
    disturbance: Disturbance
    agents: dict[str, CallingAgent] = field(default_factory=dict)
    training: Training = field(default_factory=lambda: Training(total_steps=NUM_STEPS, pace=PACE))

    @property
    def _jobs(self) -> str:
        return f"/apis/{API_VERSION}/namespaces/{self.namespace}/{PLURAL}"

    async def arm(self) -> None:
        """The disturbance is counted from here."""
        await self.proxy.arm(self.disturbance)

    async def create(self, num_members: int) -> None:
        await self.client.create(self._jobs, _job(self.job, num_members))

    async def change(self, **spec: Any) -> None:
        path = f"{self._jobs}/{self.job}"
        await self.client.request("PATCH", path, body={"spec": spec}, content_type="application/merge-patch+json")

    async def delete(self) -> None:
        try:
            await self.client.delete(f"{self._jobs}/{self.job}")
        except ApiError as error:
            if error.status != 404:
                raise

    def take_notice(self) -> None:
        """The cloud announces that it takes the newest node."""
        agent = max(self.agents.values(), key=lambda agent: agent.pod)
        agent.take_notice(datetime.now(UTC) + timedelta(seconds=NOTICE_SECONDS))

    async def pods(self) -> list[State]:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        return list((await self.client.get(path, labelSelector=f"{LABEL_JOB}={self.job}"))["items"])

    async def status(self) -> State:
        try:
            return dict((await self.client.get(f"{self._jobs}/{self.job}")).get("status", {}))
        except ApiError as error:
            if error.status != 404:
                raise
            return {"phase": "gone"}

    async def until_trains(self, generation: int, num_members: int, *, num_waiting: int = 0) -> None:
        """Wait until the generation makes steps, and the job has so many other pods."""

        def trains(status: State, pods: list[State]) -> bool:
            found = status.get("generation", {})
            training = [agent for agent in self.agents.values() if agent.trains]
            return (
                found.get("number", 0) >= generation and "firstStepAt" in found and found["state"] == "Active"
            ) and len(found["members"]) == len(pods) - num_waiting == len(training) == num_members

        await self._until(trains, f"generation {generation} trains with {num_members} members")

    async def until_phase(self, phase: str) -> None:
        """Wait until the job is in this phase without pods."""
        await self._until(lambda status, pods: status.get("phase") == phase and not pods, f"{phase} without pods")

    async def _until(self, condition: Callable[[State, list[State]], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            status, pods = await self.status(), await self.pods()
            if condition(status, pods):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not within {PATIENCE_SECONDS:.0f} s: {what}; status {_essence(status)}, {len(pods)} pods, "
                    f"agents {[str(agent.phase) for agent in self.agents.values()]}"
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def state(self) -> State:
        """What must be the same after each disturbance."""
        pods = [pod["metadata"]["labels"][LABEL_CAPACITY_TYPE] for pod in await self.pods()]
        counts = {
            "created pods": self.proxy.answered["POST pods"],
            "deleted pods": self.proxy.answered["DELETE pods"],
        }
        return _essence(await self.status()) | {"pods": sorted(pods)} | counts


def _essence(status: State) -> State:
    """The status without times, amounts of work, names and sentences."""
    generation = status.get("generation") or {}
    losses = ("preemptions", "preemptionsWithoutNotice", "stepsRedone", "failures", "generationsWithoutProgress")
    return {
        "phase": status.get("phase"),
        **{name: status.get(name, 0) for name in losses},
        "generation": (generation.get("number"), generation.get("state"), generation.get("worldSize")),
        "members": sorted(member["capacityType"] for member in generation.get("members", ())),
        "transitions": [
            (each["generation"], each["reason"], each.get("worldSizeBefore"), each.get("worldSizeAfter"))
            for each in status.get("transitions", ())
        ],
        "conditions": {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions", ())},
    }


def _job(name: str, num_members: int) -> State:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "image": "crash/none",
            "entrypoint": {"script": "train.py"},
            "nodes": {"min": 2, "max": num_members},
            "capacity": {"onDemand": {"min": 1}, "spot": {"max": num_members}},
            "batch": {"global": 6},
            "checkpoint": {"uri": f"s3://crash/{name}"},
            "runPolicy": {"cleanPodPolicy": "All"},
        },
    }
