"""Resolve an extra of the distribution to lines `name==version` for pip.

`make constraints` writes constraints.txt with it, and `make release` the list that an SBOM is made of. Nothing is
installed or built: pip resolves from the packages' metadata.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent


def resolve(extra: str, constraints: Path | None) -> list[dict[str, Any]]:
    """Return pip's report entries of all packages, in order of their names.

    spottrain itself is left out.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    if constraints is not None:
        command += ["--constraint", str(constraints)]
    output = subprocess.run([*command, f"{CHECKOUT}[{extra}]"], check=True, stdout=subprocess.PIPE).stdout
    packages = [entry for entry in json.loads(output)["install"] if not entry["is_direct"]]
    return sorted(packages, key=lambda entry: entry["metadata"]["name"].lower())


def pin(entry: dict[str, Any], *, with_hash: bool) -> str:
    """Return the line of one package.

    With `with_hash`, the line has the SHA-256 of the file that pip chose.
    """
    line = f"{entry['metadata']['name']}=={entry['metadata']['version']}"
    return f"{line} --hash=sha256:{entry['download_info']['archive_info']['hashes']['sha256']}" if with_hash else line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extra", help="an extra of pyproject.toml, such as dev or operator")
    parser.add_argument("--constraints", type=Path, help="pins to keep to; without it, the newest releases are taken")
    parser.add_argument("--hashes", action="store_true", help="add the SHA-256 of each file")
    arguments = parser.parse_args()
    for entry in resolve(arguments.extra, arguments.constraints):
        print(pin(entry, with_hash=arguments.hashes))


if __name__ == "__main__":
    main()
