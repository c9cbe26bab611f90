"""The environment of a container that is a process.

Paths of mounts are rewritten, and there is no image.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spottrain_api.contract.names import ENV_SERVICEACCOUNT_DIR, SERVICEACCOUNT_DIR
from spottrain_local.node.config import NodeConfig
from spottrain_local.node.containers import ContainerRun, HostCommand, Mount
from spottrain_local.node.paths import PathRewriter

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Programs and libraries name these mounts in their own code, where rewriting arguments does not help.
UNTOUCHED_MOUNTS = frozenset({"/dev/shm"})
# An AF_UNIX address has at most 107 bytes; Python's multiprocessing adds 32 to the temporary folder.
_MAX_TMPDIR = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What stands for an image on this node.

    See the fields of the same names in `NodeConfig`.
    """

    path_prefix: str = ""
    preload_library: Path | None = None
    hosts_file: Path | None = None
    working_dir: Path | None = None


def surroundings(config: NodeConfig) -> Surroundings:
    """Return what the node's configuration says about processes."""
    return Surroundings(
        path_prefix=config.path_prefix,
        preload_library=config.preload_library,
        hosts_file=config.hosts_file,
        working_dir=config.working_dir,
    )


def rewriter(mounts: tuple[Mount, ...]) -> PathRewriter:
    """Return what rewrites the paths of these mounts."""
    return PathRewriter({m.target: str(m.source) for m in mounts if m.target not in UNTOUCHED_MOUNTS})


def process_command(run: ContainerRun, around: Surroundings) -> HostCommand:
    """Return the process that stands for a container."""
    rewrite = rewriter(run.mounts)
    return HostCommand(
        argv=tuple(map(rewrite, (*run.command, *run.args))),
        env=process_environment(run, around),
        cwd=working_directory(run, around),
    )


def working_directory(run: ContainerRun, around: Surroundings) -> str:
    """Return the folder in which the container's processes start."""
    if run.working_dir:
        return rewriter(run.mounts)(run.working_dir)
    return str(around.working_dir or run.pod.directory / "home")


def process_arguments(command: Sequence[str], mounts: tuple[Mount, ...]) -> tuple[str, ...]:
    """Return the arguments of a command in a container.

    `kubectl cp` reads an archive that has to name files by their path in the container.
    """
    arguments = tuple(map(rewriter(mounts), command))
    if command[:2] != ("tar", "cf"):
        return arguments
    used = [m for m in mounts if any(Path(text).is_relative_to(m.source) for text in arguments)]
    return (*arguments, *(f"--transform=s,^/\\?{_literally(m.source)},{m.target.lstrip('/')}," for m in used))


def _literally(path: Path) -> str:
    """Return an absolute path without its first slash as a regular expression of sed."""
    return re.sub(r"([.*\[\]^$,\\])", r"\\\1", str(path).lstrip("/"))


def process_environment(run: ContainerRun, around: Surroundings) -> dict[str, str]:
    """Return the process's environment.

    The container's own variables override those of the node.
    """
    rewrite = rewriter(run.mounts)
    env = _folders(run, rewrite) | {name: rewrite(value) for name, value in run.env.items()}
    if around.path_prefix:
        env["PATH"] = f"{around.path_prefix}:{env['PATH']}"
    if around.preload_library and around.hosts_file:
        own = env.get("LD_PRELOAD")
        env["LD_PRELOAD"] = f"{around.preload_library}:{own}" if own else str(around.preload_library)
        env["NSS_WRAPPER_HOSTS"] = str(around.hosts_file)
    return env


def _folders(run: ContainerRun, rewrite: PathRewriter) -> dict[str, str]:
    home, temporary = run.pod.directory / "home", run.pod.directory / "tmp"
    env = {"PATH": DEFAULT_PATH, "HOME": str(home), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    if (service_account := rewrite(SERVICEACCOUNT_DIR)) != SERVICEACCOUNT_DIR:
        env[ENV_SERVICEACCOUNT_DIR] = service_account
    tmp = rewrite("/tmp")
    if tmp != "/tmp":
        env["TMPDIR"] = tmp
    elif len(str(temporary)) <= _MAX_TMPDIR:
        env["TMPDIR"] = str(temporary)
    return env
