"""Runs an example in a forked rank.

It runs as `python examples/…/train.py ARGS` would.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

settings = globals()["RANK_SETTINGS"]
os.environ.update(settings["environment"])
script = Path(settings["script"])
sys.argv = [str(script), *settings["args"]]
sys.path.insert(0, str(script.parent))
with open(settings["output"], "w") as output, contextlib.redirect_stdout(output):
    runpy.run_path(str(script), run_name="__main__")
