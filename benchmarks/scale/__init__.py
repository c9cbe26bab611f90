"""The world of `make bench-operator`.

It has a real API server, simulated kubelets, and agents of tests/world that call the real control API.
"""

import sys
from pathlib import Path

# What tests and benchmarks share is not installed.
sys.path.append(str(Path(__file__).parents[2] / "tests"))
