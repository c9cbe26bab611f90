"""Fixtures that several folders of tests share."""

import sys
from pathlib import Path

from hypothesis import settings

# importlib mode leaves sys.path alone; the shared plugins lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["cluster_fixtures", "object_stores", "trainer_runs"]

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
