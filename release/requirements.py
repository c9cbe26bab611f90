"""Write the files in requirements/, with the versions and hashes of packages.

Each package of the images has its version and the SHA-256 of its files. uv resolves for all platforms, so that pip
can check the file that it takes on any of them. If your packages come from an index of your own, name it in
UV_DEFAULT_INDEX. torch for CPUs comes from PyTorch's index, which not every machine reaches: its hashes are added on
request.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
FOLDER = CHECKOUT / "requirements"
HEADER = "# Written by `make requirements`: every package, with the SHA-256 of each of its files.\n"
# What builds packages from source: ours, and DeepSpeed.
BUILD = "hatchling\nsetuptools\n"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What a build of torch for CPUs does without, and torch itself.
OF_CUDA = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)[\[=]")


def resolve(*arguments: str, stdin: str | None = None) -> str:
    """Return uv's lock of the requirements in `arguments`.

    Versions stay within constraints.txt.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--constraints", "constraints.txt", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, input=stdin, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def split(text: str) -> tuple[str, str]:
    """Split a lock into what every build of torch needs, and the rest.

    Only the build for CUDA needs the rest.
    """
    blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    of_cuda = [block for block in blocks if OF_CUDA.match(block)]
    return "".join(block for block in blocks if block not in of_cuda), "".join(of_cuda)


def of_cpu(torch: str) -> str:
    """Return the file for torch's build for CPUs; `torch` is its line or its lock."""
    return f"# Written by `make requirements`. `make pins-images` adds the SHA-256.\n--index-url {CPU_INDEX}\n{torch}"


def write(**files: str) -> None:
    for name, text in files.items():
        (FOLDER / f"{name.replace('_', '-')}.txt").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-cpu", action="store_true", help="only add the hashes of torch for CPUs")
    trainer, cuda = split(resolve("--extra", "trainer-image", "pyproject.toml"))
    [torch] = re.findall(r"^torch==[0-9.]+", cuda, re.MULTILINE)
    if parser.parse_args().torch_cpu:
        write(trainer_cpu=of_cpu(resolve("--no-deps", "--default-index", CPU_INDEX, "-", stdin=torch)))
        return
    write(
        build=HEADER + resolve("-", stdin=BUILD),
        operator=HEADER + resolve("--extra", "operator", "pyproject.toml"),
        trainer=HEADER + trainer,
        trainer_cuda=HEADER + cuda,
        trainer_cpu=of_cpu(f"{torch}\n"),
    )


if __name__ == "__main__":
    main()
