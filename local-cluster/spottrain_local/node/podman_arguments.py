"""A container's arguments of `podman create`, and podman's errors as sentences."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from spottrain_local.node.containers import ContainerConfigError, ContainerRun, Mount
from spottrain_local.node.limits import ContainerLimits

_EXEC_ERROR = re.compile(r'exec: "(?P<command>[^"]*)": (?P<why>.*?)(?::? ?OCI |: unknown|$)')


def create_arguments(
    run: ContainerRun, *, name: str, namespace: Path, env_file: Path, labels: Mapping[str, str]
) -> list[str]:
    """Return the arguments of `podman` that create the container.

    `env_file` is for `env_lines`.
    """
    lines = [f"{key}={value}" for key, value in run.env.items() if "\n" in value]
    return [
        "create",
        f"--name={name}",
        *(f"--label={key}={value}" for key, value in labels.items()),
        "--pull=never",
        # The shim records the output.
        "--log-driver=none",
        "--systemd=false",
        "--http-proxy=false",
        f"--network=ns:{namespace}",
        f"--hostname={run.pod.hostname}",
        "--no-hosts",
        f"--env-file={env_file}",
        *(f"--env={line}" for line in lines),
        *map(_mount, _all_mounts(run)),
        *_limits(run.limits),
        *(["--interactive"] if run.input.stdin else []),
        *(["--tty"] if run.input.tty else []),
        *([f"--workdir={run.working_dir}"] if run.working_dir else []),
        # As in Kubernetes, a command also replaces the image's arguments.
        *([f"--entrypoint={json.dumps(run.command)}"] if run.command else []),
        run.image,
        *run.args,
    ]


def env_lines(env: Mapping[str, str]) -> str:
    """Return the content of podman's file of variables, which nobody else can read.

    A value in it has one line.
    """
    return "".join(f"{name}={value}\n" for name, value in env.items() if "\n" not in value)


def _all_mounts(run: ContainerRun) -> list[Mount]:
    own = {mount.target for mount in run.mounts}
    files = (Mount(source=run.pod.directory / "etc" / n, target=f"/etc/{n}") for n in ("hosts", "resolv.conf"))
    return [*(mount for mount in files if mount.target not in own), *run.mounts]


def _mount(mount: Mount) -> str:
    return f"--mount=type=bind,src={mount.source},dst={mount.target},ro={str(mount.read_only).lower()}"


def _limits(limits: ContainerLimits) -> list[str]:
    # A pod's processes are not counted, as in a kubelet by default.
    arguments = ["--pids-limit=-1", "--read-only-tmpfs=false"]
    if limits.user is not None or limits.group is not None:
        group = "" if limits.group is None else f":{limits.group}"
        arguments.append(f"--user={limits.user or 0}{group}")
    arguments += [f"--group-add={group}" for group in limits.groups]
    arguments += [f"--cap-drop={name}" for name in limits.dropped_capabilities]
    arguments += [f"--cap-add={name}" for name in limits.added_capabilities]
    if limits.privileged:
        arguments.append("--privileged")
    elif not limits.escalation:
        arguments.append("--security-opt=no-new-privileges")
    if limits.read_only_root:
        arguments.append("--read-only")
    if limits.memory_bytes is not None:
        arguments += [f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}"]
    if limits.cpus is not None:
        arguments.append(f"--cpus={limits.cpus:g}")
    return arguments


def check_user(limits: ContainerLimits, image_user: str) -> None:
    """Check runAsNonRoot against the container's user.

    A container without a user has that of its image.

    Raises:
        ContainerConfigError: The container would run as root, or might.
    """
    if not limits.non_root:
        return
    if limits.user is not None:
        if limits.user == 0:
            raise ContainerConfigError("container's runAsUser breaks non-root policy")
        return
    user = image_user.partition(":")[0]
    if user in ("", "0", "root"):
        raise ContainerConfigError("container has runAsNonRoot and image will run as root")
    if not user.isdigit():
        raise ContainerConfigError(
            f"container has runAsNonRoot and image has non-numeric user ({user}), cannot verify user is non-root"
        )


def start_failure(message: str, env: Mapping[str, str]) -> str:
    """Return podman's message about a container that did not start as a sentence."""
    match = _EXEC_ERROR.search(message)
    if not match:
        return f"{message.rstrip('.')}."
    command, why = match["command"], match["why"]
    if "not found in $PATH" in why:
        path = f" {env['PATH']}" if "PATH" in env else ""
        return f"The command {command!r} was not found on the PATH{path}."
    if "no such file or directory" in why:
        return f"The command {command!r} does not exist."
    return f"The command {command!r} cannot be started: {why.rstrip('. ').capitalize()}."
