"""Resolve an extra to the newest releases that work together.

The output has lines `name==version`. `make constraints` writes constraints.txt with it. Nothing is installed or
built: pip resolves from the packages' metadata.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def resolve(extra: str) -> list[str]:
    """Return the lines of all packages, in order of their names.

    spottrain itself is left out.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    output = subprocess.run([*command, f"{CHECKOUT}[{extra}]"], check=True, stdout=subprocess.PIPE).stdout
    found = [entry["metadata"] for entry in json.loads(output)["install"] if not entry["is_direct"]]
    return [f"{each['name']}=={each['version']}" for each in sorted(found, key=lambda each: each["name"].lower())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extra", help="an extra of pyproject.toml, such as dev")
    for line in resolve(parser.parse_args().extra):
        print(line)


if __name__ == "__main__":
    main()
