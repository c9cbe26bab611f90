"""Which checkpoint.uri of two jobs name one folder."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.facts.folders import folder_of
from spottrain_operator.core.model import JobView

URI, FILE = "s3://bucket/run", "file:///checkpoints/run"


def job(
    uri: str,
    *mounts: dict[str, Any],
    endpoint: str | None = None,
    namespace: str = "team",
    **env: str | dict[str, Any],
) -> JobView:
    """Each mount is a mountPath (`at`), maybe a `subPath`, and the volume's source.

    A variable of `env` has a value, or a source.
    """
    volumes, volume_mounts = [], []
    for number, mount in enumerate(mounts):
        source = {key: value for key, value in mount.items() if key not in ("at", "subPath")}
        sub_path = {"subPath": mount["subPath"]} if "subPath" in mount else {}
        volumes.append({"name": f"v{number}"} | source)
        volume_mounts.append({"name": f"v{number}", "mountPath": mount["at"]} | sub_path)
    spec = {
        "image": "local/train",
        "entrypoint": {"script": "train.py"},
        "nodes": {"max": 2},
        "batch": {"global": 8},
        "checkpoint": {"uri": uri, "endpointURL": endpoint},
        "env": [
            {"name": name, "value" if isinstance(value, str) else "valueFrom": value} for name, value in env.items()
        ],
        "podTemplate": {"volumes": volumes, "volumeMounts": volume_mounts},
    }
    return JobView(
        namespace=namespace,
        name="job",
        uid="a",
        spec=TrainingJobSpec.model_validate(spec),
        metadata_generation=1,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def claim(name: str, at: str = "/checkpoints", **mount: str) -> dict[str, Any]:
    return {"at": at, "persistentVolumeClaim": {"claimName": name}, **mount}


SECRET = {"secretKeyRef": {"name": "bucket", "key": "address"}}
EMPTY: dict[str, Any] = {"at": "/checkpoints", "emptyDir": {}}
PAIRS = {
    "the same": (job(URI), job(URI), True),
    "in another namespace": (job(URI), job(URI, namespace="other"), False),
    "dots in the name of an object": (job(URI), job("s3://bucket/other/../run"), False),
    "a query, which no store has": (job(URI), job(f"{URI}?versions"), True),
    "an address that can't be read": (job("s3://[bucket/run"), job("s3://[bucket/run"), True),
    "a slash at the end": (job(URI), job(f"{URI}/"), True),
    "two slashes in a row": (job(URI), job("s3://bucket//run"), True),
    "a bucket, and a folder in it": (job("s3://bucket"), job(URI), False),
    "a folder inside the other": (job(URI), job(f"{URI}/a/b"), False),
    "a name that begins alike": (job(URI), job(f"{URI}2"), False),
    "another bucket": (job(URI), job("s3://bucket2/run"), False),
    "another kind of store": (job(URI), job("gs://bucket/run"), False),
    "another endpoint": (job(URI), job(URI, endpoint="http://minio:9000"), False),
    "an endpoint with a slash": (job(URI, endpoint="http://m"), job(URI, endpoint="http://m/"), True),
    "an endpoint in other letters": (job(URI, endpoint="http://m/A"), job(URI, endpoint="HTTP://M/A"), True),
    "paths of an endpoint": (job(URI, endpoint="http://m/a"), job(URI, endpoint="http://m/A"), False),
    "an endpoint that can't be read": (job(URI, endpoint="http://[m"), job(URI, endpoint="http://[m"), True),
    "an endpoint in env": (job(URI, endpoint="http://m"), job(URI, AWS_ENDPOINT_URL="http://m/"), True),
    "two endpoints in env": (job(URI, AWS_ENDPOINT_URL="http://m"), job(URI, AWS_ENDPOINT_URL="http://n"), False),
    "that of S3 comes first": (
        job(URI, AWS_ENDPOINT_URL_S3="http://m", AWS_ENDPOINT_URL="http://n"),
        job(URI, AWS_ENDPOINT_URL_S3="http://m"),
        True,
    ),
    "endpointURL comes before env": (
        job(URI, endpoint="http://m", AWS_ENDPOINT_URL_S3="http://n"),
        job(URI, endpoint="http://m"),
        True,
    ),
    "an empty endpoint in env": (job(URI, AWS_ENDPOINT_URL_S3=""), job(URI), True),
    "an endpoint in a Secret is not known": (job(URI, AWS_ENDPOINT_URL_S3=SECRET), job(URI), True),
    "the endpoint of another kind of store": (job(URI, STORAGE_EMULATOR_HOST="http://m"), job(URI), True),
    "endpoints of Cloud Storage": (
        job("gs://bucket/run", STORAGE_EMULATOR_HOST="http://m"),
        job("gs://bucket/run", endpoint="http://m"),
        True,
    ),
    "two accounts of Azure": (
        job("az://bucket/run", endpoint="https://a.blob.core.windows.net"),
        job("az://bucket/run", AZURE_STORAGE_ACCOUNT="b"),
        False,
    ),
    "an account of Azure in env": (
        job("az://bucket/run", endpoint="https://a.blob.core.windows.net/"),
        job("az://bucket/run", AZURE_STORAGE_ACCOUNT="a"),
        True,
    ),
    "volumes matter to files alone": (job(URI, EMPTY), job(URI, EMPTY), True),
    "files without volumes": (job(FILE), job(f"{FILE}/"), True),
    "files of another namespace": (job(FILE), job(FILE, namespace="other"), False),
    "dots in a path": (job(FILE), job("file:///checkpoints/./other/../run"), True),
    "dots above the root": (job(FILE), job("file:///../checkpoints/run"), True),
    "three slashes in a path": (job(FILE), job("file:////checkpoints///run"), True),
    "dots in a mountPath": (job(FILE, claim("data")), job(FILE, claim("data", "/a/../checkpoints/.")), True),
    "other files without volumes": (job(FILE), job("file:///checkpoints/other"), False),
    "files have no endpoint": (job(FILE), job(FILE, endpoint="http://minio:9000"), True),
    "a claim": (job(FILE, claim("data")), job(FILE, claim("data")), True),
    "a claim, and no volume": (job(FILE, claim("data")), job(FILE), False),
    "two claims": (job(FILE, claim("data")), job(FILE, claim("data2")), False),
    "claims of two namespaces": (job(FILE, claim("data")), job(FILE, claim("data"), namespace="other"), False),
    "two folders of a claim": (job(FILE, claim("data")), job("file:///checkpoints/other", claim("data")), False),
    "a claim mounted elsewhere": (job(FILE, claim("data")), job("file:///data/run", claim("data", "/data/")), True),
    "a claim's subPath": (job(FILE, claim("data")), job("file:///run", claim("data", "/run", subPath="run")), True),
    "two subPaths": (job(FILE, claim("data", subPath="a")), job(FILE, claim("data", subPath="b")), False),
    "a claim at the root": (job(FILE, claim("data", "/")), job(FILE, claim("data", "/")), True),
    "a claim mounted beside": (job(FILE, claim("data", "/check")), job(FILE, claim("other", "/check")), True),
    "the nearest mount counts": (
        job(FILE, claim("near", FILE.removeprefix("file://")), claim("data")),
        job(FILE, claim("data")),
        False,
    ),
    "volumes of their own": (job(FILE, EMPTY), job(FILE, EMPTY), False),
    "a volume of its own, and none": (job(FILE, EMPTY), job(FILE), False),
    "a claim without a name": (job(FILE, {"at": "/checkpoints", "persistentVolumeClaim": {}}), job(FILE), False),
}


@pytest.mark.parametrize(("one", "other", "same"), PAIRS.values(), ids=PAIRS)
def test_whether_two_jobs_have_one_folder(one: JobView, other: JobView, same: bool) -> None:
    assert (folder_of(one) == folder_of(replace(other, name="other", uid="b"))) is same
