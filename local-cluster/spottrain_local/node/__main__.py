"""`python -m spottrain_local.node --config FILE`: one node process."""

import argparse
import sys
from pathlib import Path

from spottrain_local.node.process import main

parser = argparse.ArgumentParser(prog="python -m spottrain_local.node", description=__doc__)
parser.add_argument("--config", type=Path, required=True, help="path of the node's configuration, a JSON file")
parser.add_argument("--verbose", action="store_true", help="log more")
options = parser.parse_args()
sys.exit(main(options.config, verbose=options.verbose))
