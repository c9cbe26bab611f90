"""Fixtures that several folders of tests share."""

import sys
from pathlib import Path

# importlib mode leaves sys.path alone; the shared plugins lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["cluster_fixtures", "object_stores"]
