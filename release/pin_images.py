"""Renew the digests of the base images in release/images.mk.

`make pins-images` runs it. It asks the registry with skopeo, crane or docker, whichever is on the PATH. podman
prints the digest of one platform, not of the image for all.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

IMAGES = Path(__file__).with_name("images.mk")
# The command of each tool that prints the digest.
TOOLS = {
    "skopeo": ["inspect", "--format={{.Digest}}", "docker://IMAGE"],
    "crane": ["digest", "IMAGE"],
    "docker": ["buildx", "imagetools", "inspect", "--format={{.Manifest.Digest}}", "IMAGE"],
}
BASE = re.compile(r"^(\w+_BASE := )([^@\s]+)(?:@\S+)?$", re.MULTILINE)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def find_tool() -> str:
    """Return the first of the tools that is on the PATH."""
    for tool in TOOLS:
        if shutil.which(tool):
            return tool
    raise SystemExit(f"None of {', '.join(TOOLS)} is on the PATH. Install one: it asks registries for digests.")


def digest(tool: str, image: str) -> str:
    """Return the digest that the registry has for this tag."""
    asked = [tool, *(argument.replace("IMAGE", image) for argument in TOOLS[tool])]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{image}: {tool} got no digest, and {IMAGES.name} stays as it is: {done.stderr.strip()}")
    if not DIGEST.fullmatch(found := done.stdout.strip()):
        raise SystemExit(f"{image}: {tool} printed {found!r} instead of a digest. {IMAGES.name} stays as it is.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=IMAGES, help="file with the names of the images")
    file = parser.parse_args().file
    tool = find_tool()
    text = BASE.sub(lambda found: f"{found[1]}{found[2]}@{digest(tool, found[2])}", file.read_text())
    file.write_text(text)
    sys.stdout.writelines(f"{found[0]}\n" for found in re.finditer(r"^\w+_BASE := .*$", text, re.MULTILINE))


if __name__ == "__main__":
    main()
