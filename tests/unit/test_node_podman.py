"""A container's securityContext and resources as arguments of podman.

Podman's errors become sentences.
"""

from pathlib import Path
from typing import Any

import pytest

from spottrain_local.node.containers import ContainerConfigError, ContainerRun, Mount, PodSandbox
from spottrain_local.node.limits import ContainerLimits, container_limits
from spottrain_local.node.podman_arguments import check_user, create_arguments, env_lines, start_failure

POD = PodSandbox(
    uid="u", namespace="ns", hostname="h", ip="10.16.1.2", host_network=False, directory=Path("/state/pod")
)
FIXED = ["create", "--name=n", "--network=ns:/run/netns/x", "--env-file=/env", "--label=a=b", "--hostname=h"]


def arguments(**changes: Any) -> list[str]:
    values: dict[str, Any] = {
        "pod": POD,
        "name": "c",
        "image": "image:1",
        "env": {},
        "log_path": Path("/log"),
        "directory": Path("/run"),
        "container_id": "",
    }
    run = ContainerRun(**values | changes)
    return create_arguments(run, name="n", namespace=Path("/run/netns/x"), env_file=Path("/env"), labels={"a": "b"})


def limits(container: dict[str, Any], pod: dict[str, Any] | None = None) -> ContainerLimits:
    return container_limits({"spec": {"securityContext": pod}}, container)


def test_a_container_has_the_networks_names_and_no_variables_of_podman() -> None:
    found = arguments()
    assert set(FIXED) <= set(found)
    assert "--mount=type=bind,src=/state/pod/etc/resolv.conf,dst=/etc/resolv.conf,ro=false" in found
    assert {"--http-proxy=false", "--pull=never", "--no-hosts"} <= set(found)
    assert found[-1] == "image:1"


@pytest.mark.parametrize(
    ("command", "args", "end"),
    [
        ((), (), ["image:1"]),
        ((), ("-v", "x"), ["image:1", "-v", "x"]),
        (("sh", "-c"), (), ['--entrypoint=["sh", "-c"]', "image:1"]),
        (("sh", "-c"), ("echo",), ['--entrypoint=["sh", "-c"]', "image:1", "echo"]),
    ],
    ids=["image's own", "args alone", "command alone", "both"],
)
def test_command_and_args_override_the_images(
    command: tuple[str, ...], args: tuple[str, ...], end: list[str]
) -> None:
    assert arguments(command=command, args=args)[-len(end) :] == end
    assert any(a.startswith("--entrypoint") for a in arguments(command=command)) is bool(command)


def test_a_pods_own_hosts_file_wins() -> None:
    own = Mount(source=Path("/v/hosts"), target="/etc/hosts", read_only=True)
    mounts = [a for a in arguments(mounts=(own,)) if "dst=/etc/hosts" in a]
    assert mounts == ["--mount=type=bind,src=/v/hosts,dst=/etc/hosts,ro=true"]


def test_variables_with_several_lines_are_not_in_the_file() -> None:
    env = {"A": "1", "B": "two\nlines", "C": "# no comment"}
    assert env_lines(env) == "A=1\nC=# no comment\n"
    assert "--env=B=two\nlines" in arguments(env=env)


@pytest.mark.parametrize(
    ("container", "pod", "expected"),
    [
        ({}, {"runAsUser": 7, "runAsGroup": 8, "fsGroup": 9}, ["--user=7:8", "--group-add=9"]),
        ({"securityContext": {"runAsUser": 1}}, {"runAsUser": 7}, ["--user=1"]),
        ({}, {"supplementalGroups": [5, 6], "fsGroup": 5}, ["--group-add=5", "--group-add=6"]),
        (
            {"securityContext": {"capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}}},
            {},
            ["--cap-drop=ALL", "--cap-add=SYS_PTRACE"],
        ),
        ({"securityContext": {"allowPrivilegeEscalation": False}}, {}, ["--security-opt=no-new-privileges"]),
        ({"securityContext": {"privileged": True}}, {}, ["--privileged"]),
        ({"securityContext": {"readOnlyRootFilesystem": True}}, {}, ["--read-only"]),
        (
            {"resources": {"limits": {"memory": "1Gi", "cpu": "1500m"}}},
            {},
            ["--memory=1073741824", "--memory-swap=1073741824", "--cpus=1.5"],
        ),
    ],
)
def test_limits_are_arguments(container: dict[str, Any], pod: dict[str, Any], expected: list[str]) -> None:
    without, found = arguments(), arguments(limits=limits(container, pod))
    assert [argument for argument in found if argument not in without] == expected


@pytest.mark.parametrize(
    ("container", "image_user", "sentence"),
    [
        ({"runAsNonRoot": True}, "", "image will run as root"),
        ({"runAsNonRoot": True}, "0:0", "image will run as root"),
        ({"runAsNonRoot": True}, "app", "non-numeric user"),
        ({"runAsNonRoot": True, "runAsUser": 0}, "65532", "breaks non-root policy"),
    ],
)
def test_a_container_that_may_run_as_root_is_refused(
    container: dict[str, Any], image_user: str, sentence: str
) -> None:
    with pytest.raises(ContainerConfigError, match=sentence):
        check_user(limits({"securityContext": container}), image_user)


@pytest.mark.parametrize(
    ("container", "image_user"),
    [({}, ""), ({"runAsNonRoot": True}, "65532:65532"), ({"runAsNonRoot": True, "runAsUser": 1}, "root")],
)
def test_other_users_are_accepted(container: dict[str, Any], image_user: str) -> None:
    check_user(limits({"securityContext": container}), image_user)


RUNC = 'unable to start container "1": runc: runc create failed: unable to start container process: exec: '


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            RUNC + '"nope": executable file not found in $PATH: OCI runtime attempted to invoke a command',
            "The command 'nope' was not found on the PATH /bin.",
        ),
        (
            RUNC + '"/nope": stat /nope: no such file or directory: OCI not found',
            "The command '/nope' does not exist.",
        ),
        (RUNC + '"/etc": permission denied: OCI permission denied', "'/etc' cannot be started: Permission denied."),
        ("cannot set up the mount.", "cannot set up the mount."),
    ],
)
def test_podmans_errors_are_sentences(message: str, sentence: str) -> None:
    assert start_failure(message, {"PATH": "/bin"}).endswith(sentence)
