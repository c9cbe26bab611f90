"""The commands of the guides for clouds run with tools that only take note.

They run on the files that the reader saves. What needs the cloud is not checked: these guides say themselves that no
cloud has run them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import botocore.session
import botocore.validate
import pytest
import yaml
from botocore import xform_name

from rendered_objects import objects_in
from spottrain_api.contract.names import KIND
from spottrain_local.install import find_helm

ROOT = Path(__file__).parents[2]
GUIDES = {name: ROOT / "docs" / "how-to" / f"install-{name}.md" for name in ("eks", "gke", "aks")}
PAGES = {**GUIDES, "tutorial": ROOT / "docs" / "tutorial" / "cluster.md"}
NOTED = ("aws", "az", "docker", "eksctl", "gcloud", "git", "helm", "kubectl", "make", "spottrain")
BLOCK = re.compile(
    r"(?:Save\s+this\s+as\s+`(?P<saved>[\w.-]+)`)?(?P<before>[^`]*)\n```(?P<language>\w+)\n(?P<text>.*?)\n```",
    re.S,
)
# Commands of the AWS CLI that are no operations of the API.
OWN_COMMANDS_OF_AWS = {("s3", "mb"), ("s3", "rb"), ("ecr", "get-login-password")}
OPTIONS_OF_AWS = {"query", "output", "cli-input-json", "region"}
NODE_GROUP = {
    "name",
    "instanceType",
    "instanceTypes",
    "spot",
    "minSize",
    "maxSize",
    "desiredCapacity",
    "volumeSize",
    "taints",
}


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A guide's commands, as its tools were called.

    `folder` holds the files that the guide has the reader save.
    """

    folder: Path
    calls: list[list[str]]

    def of(self, tool: str, *first: str) -> list[list[str]]:
        return [call for call in self.calls if call[: 1 + len(first)] == [tool, *first]]


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text()))


@pytest.fixture(scope="module", params=PAGES)
def guide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("charts", "examples"):
        (folder / name).symlink_to(ROOT / name)
    # The tools read nothing: one that writes into a pipe may find that the other has ended.
    script = ["trap '' PIPE", "cd() { :; }"]
    script += [
        f'{tool}() {{ printf "%q " {tool} "$@" >>"$CALLS"; echo >>"$CALLS"; echo test || :; }}' for tool in NOTED
    ]
    for block in blocks(PAGES[request.param]):
        if block["saved"]:
            (folder / block["saved"]).write_text(block["text"])
        if block["language"] == "sh":
            script.append(block["text"])
    calls = folder / "calls"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(script)],
        cwd=folder,
        env=os.environ | {"CALLS": str(calls)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return Rehearsal(folder, [shlex.split(line) for line in calls.read_text().splitlines()])


def option(call: list[str], *names: str) -> list[str]:
    """The values of an option."""
    spaced = [value for name, value in pairwise(call) if name in names]
    return spaced + [each.partition("=")[2] for each in call if each.partition("=")[0] in names and "=" in each]


def test_every_file_that_a_command_reads_is_there(guide: Rehearsal) -> None:
    read = [file for call in guide.calls for file in option(call, "-f", "--values")]
    read += [each.removeprefix("file://") for call in guide.of("aws") for each in call if each.startswith("file://")]
    read += [call[-1] for call in guide.of("docker", "build")]
    assert len(read) >= 3
    assert [file for file in read if not (guide.folder / file).exists()] == []


def test_make_has_every_target(guide: Rehearsal) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    [call] = guide.of("make")
    assert set(call[1:]) <= targets


@pytest.mark.cluster
def test_helm_installs_the_image_that_was_pushed(guide: Rehearsal) -> None:
    ours = [call for call in guide.of("helm", "upgrade") if "charts/spottrain" in call]
    assert ours
    for call in ours:
        arguments = [each for each in call[2:] if each != "--install"]
        command = [find_helm(), "template", *arguments]
        done = subprocess.run(command, cwd=guide.folder, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        objects = objects_in(done.stdout)
        named = {(each["kind"].lower(), each["metadata"]["name"]) for each in objects}
        assert {("deployment", "spottrain-operator"), ("daemonset", "spottrain-watcher")} <= named
        if "--install" in call:
            image = objects_of(objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["image"]
            assert re.fullmatch(r"\S+/spottrain-operator:[0-9.]+", image)
        for status in guide.of("kubectl"):
            if "rollout" in status:
                assert tuple(status[-2:]) in named
    assert all(call[2] == ours[0][ours[0].index("charts/spottrain") - 1] for call in guide.of("helm", "test"))


def objects_of(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def test_the_job_is_in_the_namespace_and_has_the_account_that_were_made(guide: Rehearsal) -> None:
    [job] = [each for each in yaml.safe_load_all((guide.folder / "gpt.yaml").read_text()) if each["kind"] == KIND]
    made = {tuple(call[2:4]) for call in guide.of("kubectl", "create")}
    assert ("namespace", job["metadata"]["namespace"]) in made
    account = job["spec"]["podTemplate"]["serviceAccountName"] if "podTemplate" in job["spec"] else None
    assert account is None or ("serviceaccount", account) in made
    watched = [call for call in guide.of("kubectl") if "tj" in call and job["metadata"]["name"] in call]
    assert watched
    assert all(option(call, "-n") == [job["metadata"]["namespace"]] for call in watched)
    image = job["spec"]["image"].rpartition("/")[2]
    assert any(call[-1].endswith(f"/{image}") for call in guide.of("docker", "push"))


def test_yaml_and_json_parse(guide: Rehearsal) -> None:
    for file in guide.folder.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".yaml":
            assert all(each["apiVersion"] for each in yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_says_that_no_cloud_has_run_it(name: str) -> None:
    text = GUIDES[name].read_text()
    assert re.search(rf"^\*\*Not run on {name.upper()} yet\*\* \(as of \d{{4}}-\d\d-\d\d\)\.", text, re.M)


@pytest.fixture(scope="module")
def eks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that the guide for EKS has the reader save."""
    return {block["saved"]: block["text"] for block in blocks(GUIDES["eks"]) if block["saved"]}


def test_eksctl_makes_what_the_guide_is_about(eks: dict[str, str]) -> None:
    config = yaml.safe_load(eks["cluster.yaml"])
    assert (config["apiVersion"], config["kind"]) == ("eksctl.io/v1alpha5", "ClusterConfig")
    groups = {group["name"]: group for group in config["managedNodeGroups"]}
    assert [name for name, group in groups.items() if group.get("spot")] == ["spot"]
    assert all(group.keys() <= NODE_GROUP for group in groups.values())
    [association] = config["iam"]["podIdentityAssociations"]
    job = yaml.safe_load(eks["gpt.yaml"])
    assert association["namespace"] == job["metadata"]["namespace"]
    assert association["serviceAccountName"] == job["spec"]["podTemplate"]["serviceAccountName"]
    bucket = job["spec"]["checkpoint"]["uri"].split("/")[2]
    allowed = {each["Resource"] for each in association["permissionPolicy"]["Statement"]}
    assert allowed == {f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"}
    assert "eks-pod-identity-agent" in {addon["name"] for addon in config["addons"]}
    assert job["spec"]["env"] == [{"name": "AWS_REGION", "value": config["metadata"]["region"]}]


@pytest.mark.parametrize("guide", ["eks"], indirect=True)
def test_the_aws_api_has_every_operation_and_option(guide: Rehearsal) -> None:
    session = botocore.session.get_session()
    calls = guide.of("aws")
    assert len(calls) > 8
    for _, service, command, *rest in calls:
        if (service, command) in OWN_COMMANDS_OF_AWS:
            continue
        model = session.get_service_model(service)
        [operation] = [name for name in model.operation_names if xform_name(name, "-") == command]
        shape = model.operation_model(operation).input_shape
        known = {xform_name(name, "-") for name in (shape.members if shape else ())} | OPTIONS_OF_AWS | {"force"}
        assert {each[2:].partition("=")[0] for each in rest if each.startswith("--")} <= known, command
        for file in option(rest, "--cli-input-json"):
            given = json.loads((guide.folder / file.removeprefix("file://")).read_text())
            report = botocore.validate.ParamValidator().validate({"clientToken": "x", **given}, shape)
            assert not report.has_errors(), report.generate_report()
