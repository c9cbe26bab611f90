"""What tests draw at random, as a pytest plugin.

In the gate every run draws the same. With SPOTTRAIN_SEED=random, as in the nightly runs, each draws something else,
and the first lines say by which seed. SPOTTRAIN_SEED=<that seed> repeats it.
"""

from __future__ import annotations

import os
import random
import secrets

import pytest
from hypothesis import settings

ENV_SEED = "SPOTTRAIN_SEED"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed, also of Hypothesis."""
    if os.environ.get(ENV_SEED) == "random":
        os.environ[ENV_SEED] = str(secrets.randbelow(2**31))  # processes of xdist inherit it
    seed = os.environ.get(ENV_SEED)
    # How long an example takes says more about what else the machine does than about the code.
    settings.register_profile("any-machine", deadline=None, derandomize=seed is None)
    settings.load_profile("any-machine")
    if seed is not None and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = seed


def pytest_report_header() -> str:
    seed = os.environ.get(ENV_SEED)
    if seed is None:
        return f"draws: the same each time; {ENV_SEED}=random draws others"
    return f"draws: {ENV_SEED}={seed} repeats them"


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """What this test draws from. It doesn't depend on the tests before."""
    return random.Random(f"{os.environ.get(ENV_SEED)} {request.node.name}")
