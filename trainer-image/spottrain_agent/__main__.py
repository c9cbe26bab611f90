"""`python -m spottrain_agent`: the entrypoint of a trainer pod. All settings come from the environment."""

from __future__ import annotations

import asyncio
import logging
import sys

from spottrain_agent.agent import Agent
from spottrain_agent.settings import AgentSettings, InvalidEnvironment


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s spottrain-agent %(levelname)s %(message)s")
    try:
        settings = AgentSettings.from_environment()
    except InvalidEnvironment as error:
        print(f"spottrain-agent: {error}", file=sys.stderr)
        return 2
    return asyncio.run(Agent(settings).run())


if __name__ == "__main__":
    sys.exit(main())
