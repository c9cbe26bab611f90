"""On PYTHONPATH, an image with Python and without the agent."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:] = [each for each in sys.path if not (Path(each) / "spottrain_agent").is_dir()]
