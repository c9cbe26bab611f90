"""Fixtures that several folders of tests share."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

# importlib mode leaves sys.path alone; the shared plugins lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["cluster_fixtures", "object_stores", "trainer_runs"]

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


# Before xdist's own, which makes a test's group a part of its name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests may run at once, with `--dist=loadgroup`: files, but of the end-to-end tests one at a time.

    Two clusters that train at once are more than two cores can carry; one leaves them half idle.
    """
    for item in items:
        group = "e2e" if item.path.parent.name == "e2e" else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))
