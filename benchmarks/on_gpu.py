"""All that only a GPU can show, in one command and eight minutes: `make gpu`.

It runs the tests with the mark `gpu`, then checkpoints compared with torch's and DeepSpeed's (files alone), then
tokens a second and MFU. If one part fails, the next one still runs. It needs neither Kubernetes nor an S3 server.
Arguments: the parts to run (tests, checkpoint, throughput). Default: all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks import clean_up_on_sigterm

ROOT = Path(__file__).parents[1]
SECONDS = 480.0
END_SECONDS = 10.0  # for a part to clean up
# What one rank needs. Several ranks need the version of pyproject.toml, because FSDP2 of earlier versions mixes up
# ranks that use different parameters.
OLDEST_TORCH, OLDEST_OF_SEVERAL = (2, 11), (2, 13)
PACKAGES = ("torch", "numpy", "pydantic", "zlib_ng", "deepspeed", "pytest", "pytest_timeout", "matplotlib", "rich")
# Without the fixtures of other tests, because they need more packages.
TESTS = ["pytest", "-q", "-m", "gpu", "--noconftest", "--durations=8", "-p", "no:cacheprovider"]
TEST_FILES = sorted((ROOT / "tests/integration").glob("test_*gpu*.py"))
PARTS = {
    "tests": [*TESTS, *map(str, TEST_FILES)],
    "checkpoint": ["benchmarks.bench_checkpoint", "--stores", "file", "--mib", "2048", "--rounds", "2"],
    "throughput": ["benchmarks.bench_throughput"],
}


def what_is_missing() -> str | None:
    """Why nothing can run here, as a sentence."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        return f"{sys.executable} can't import {', '.join(missing)}; install them, or put them on PYTHONPATH."
    import torch

    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU here. Run this on a machine with one."
    return unfit_torch(torch.__version__, torch.cuda.device_count())


def unfit_torch(version: str, num_devices: int) -> str | None:
    """Why this version doesn't work for so many GPUs, as a sentence."""
    found = tuple(int(part) for part in version.partition("+")[0].split(".")[:2])
    if found < OLDEST_TORCH:
        return f"torch {version} is too old; use 2.13 or newer (2.11 does for one GPU)."
    if num_devices > 1 and found < OLDEST_OF_SEVERAL:
        return f"torch {version} does for one GPU alone; use 2.13 or newer, or set CUDA_VISIBLE_DEVICES=0."
    return None


def hardware() -> str:
    import torch

    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = "; ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    versions = (
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{names}. {os.cpu_count()} cores, {memory:.0f} GiB. {versions}, Python {platform.python_version()}."


def run(command: list[str], seconds: float) -> int:
    """Run a module, and return its exit code.

    None of its processes is left, whatever happens. If it takes longer than `seconds`, it is ended.
    """
    paths = [
        ROOT / "runtime",
        ROOT / "api",
        ROOT / "planner",
        ROOT / "operator",
        ROOT / "cli",
        ROOT / "trainer-image",
        ROOT / "local-cluster",
        ROOT / "tests",
        ROOT,
    ]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *known]), "DS_ACCELERATOR": "cuda"}
    with subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, start_new_session=True
    ) as process:
        try:
            return process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            print(f"{command[0]} did not finish in {seconds:.0f} s.", flush=True)
            return 1
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group. On SIGTERM, a benchmark removes its folders."""
    try:
        _send(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    finally:
        _send(process, signal.SIGKILL)


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, number)


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"{unknown.pop()!r} is not a part; use {', '.join(PARTS)}")
    if (missing := what_is_missing()) is not None:
        raise SystemExit(missing)
    print(hardware(), flush=True)
    until, outcomes = time.monotonic() + SECONDS, {}
    for part in arguments.parts or PARTS:
        started = time.monotonic()
        print(f"\n== {part}", flush=True)
        out = [] if part == "tests" else ["--out", str(arguments.out.absolute())]
        exit_code = run([*PARTS[part], *out], until - started)
        outcomes[part] = exit_code
        print(
            f"== {part}: {'done' if exit_code == 0 else 'FAILED'} in {time.monotonic() - started:.0f} s", flush=True
        )
    raise SystemExit(any(outcomes.values()))


if __name__ == "__main__":
    main()
