"""What `python -m spottrain_agent` runs. All settings come from the environment."""

from __future__ import annotations

import asyncio
import os
import sys

from spottrain_agent.agent import Agent
from spottrain_agent.settings import AgentSettings, InvalidEnvironment
from spottrain_agent.zygote_process import LaunchFailed, SpawnZygote, spawn_zygote
from spottrain_api.contract.names import ENV_JOB, ENV_NAMESPACE
from spottrain_runtime import logs
from spottrain_runtime.processes import open_many_files


def main(spawn: SpawnZygote = spawn_zygote) -> int:
    """Run the agent, whose zygotes `spawn` starts. Returns the exit code."""
    open_many_files()
    try:
        logs.configure("spottrain-agent")
        settings = AgentSettings.from_environment()
    except (InvalidEnvironment, ValueError) as error:
        print(f"spottrain-agent: {error}", file=sys.stderr)
        return 2
    logs.remember(job=os.environ.get(ENV_JOB), namespace=os.environ.get(ENV_NAMESPACE), member=settings.pod)
    try:
        return asyncio.run(Agent(settings, spawn).run())
    except LaunchFailed as error:
        # The operator quotes the last line of a pod that ended before it could train.
        print(f"spottrain-agent: {error}", file=sys.stderr)
        return 1
