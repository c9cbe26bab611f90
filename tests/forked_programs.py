"""Python scripts as a shell would run them, in forks of the process that ranks are forked from.

So they need not import torch again.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any


def run_forked(
    fork: Any, script: Path, *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = 240.0
) -> CompletedProcess[str]:
    """Run `python SCRIPT ARGUMENTS` to its end, with this environment besides."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        command = [str(script), *arguments]
        process = fork.Process(target=_run, args=(command, dict(environment or {}), [output, errors]))
        try:
            process.start()
            process.join(seconds)
            assert not process.is_alive(), f"{script} hangs"
        finally:
            process.kill()
            process.join()
        return CompletedProcess(command, process.exitcode, output.read_text(), errors.read_text())


def _run(command: list[str], environment: dict[str, str], outputs: list[Path]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        with path.open("w") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
