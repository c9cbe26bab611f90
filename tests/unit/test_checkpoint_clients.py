"""The clouds' clients: settings, and errors for credentials that are missing."""

from __future__ import annotations

import io
import json
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from google.cloud.storage.exceptions import DataCorruption

from spottrain.checkpoint.errors import (
    CredentialsMissing,
    ObjectNotFound,
    StorageDenied,
    StorageMissing,
    StorageUnavailable,
)
from spottrain.checkpoint.stores.gcs_storage import GcsStorage
from spottrain.checkpoint.stores.s3_client import s3_client
from spottrain.checkpoint.stores.s3_storage import S3Storage
from spottrain.checkpoint.stores.uri import open_storage


class Server:
    """Answers in the place of the network, and keeps what it was sent."""

    def __init__(self) -> None:
        self.requests: list[AWSPreparedRequest] = []

    def answer(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        self.requests.append(request)
        body = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
        return AWSResponse(
            request.url, 200, {"ETag": '"1"'}, Answer(body if request.url.endswith("?uploads") else b"")
        )


class Answer:
    """What botocore reads an answer from."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> Iterator[bytes]:
        yield self._body


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize(
    ("env", "region"),
    [
        ({}, "eu-west-1"),
        ({"AWS_PROFILE": "other"}, "eu-north-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-2"),
        ({"AWS_DEFAULT_REGION": "eu-west-2", "AWS_REGION": "eu-west-3"}, "eu-west-3"),
        ({"AWS_CONFIG_FILE": "missing"}, "us-east-1"),
    ],
    ids=str,
)
def test_the_region_is_that_of_the_environment_or_of_the_profile(
    env: dict[str, str], region: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "config"
    config.write_text("[default]\nregion = eu-west-1\n[profile other]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert S3Storage(bucket="b")._client.meta.region_name == region


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("endpoint", [None, "https://s3.example.org", "http://s3.example.org"])
@pytest.mark.parametrize("size", [4, 9 << 20], ids=["whole", "in parts"])
def test_an_upload_is_sent_at_once_and_over_tls_without_a_second_checksum(
    endpoint: str | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    server, storage = Server(), S3Storage(bucket="b", endpoint_url=endpoint)
    storage._client.meta.events.register("before-send.s3", server.answer)
    storage.put("HEAD", b"1", if_absent=True)
    storage.upload("k", bytes(size))
    assert not [request for request in server.requests if "Expect" in request.headers]
    sent = [request.headers for request in server.requests if request.method == "PUT" and "/k" in request.url]
    assert all("x-amz-checksum-crc32" in headers for headers in sent)
    assert {is_unsigned(request) for request in server.requests if "/k" in request.url} == {
        endpoint != "http://s3.example.org"
    }


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_endpoint_that_only_the_users_configuration_knows_is_heeded(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {scheme}://s3.example.org\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    server, storage = Server(), S3Storage(bucket="b")
    storage._client.meta.events.register("before-send.s3", server.answer)
    storage.upload("k", b"1234")
    assert [is_unsigned(request) for request in server.requests] == [scheme == "https"]


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("AccessDenied", "let the job's service account read, write, list and delete there"),
        ("InvalidAccessKeyId", r"the store does not know the access key\. Correct AWS_ACCESS_KEY_ID in env"),
        ("SignatureDoesNotMatch", r"the secret key does not belong to .* Correct AWS_SECRET_ACCESS_KEY in env"),
        ("ExpiredToken", r"the credentials have expired\. Renew them"),
    ],
)
def test_a_refusal_names_the_rights_or_the_key_that_is_wrong(code: str, remedy: str) -> None:
    storage = refusing(403, code)
    for use in (lambda: storage.put("k", b""), lambda: list(storage.list(""))):
        with pytest.raises(StorageDenied, match=rf"is denied \({code}: no\): {remedy}"):
            use()


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize(
    "code",
    [
        *("RequestTimeout", "IncompleteBody", "BadDigest"),
        *("ThrottlingException", "KMS.ThrottlingException"),
        *("Throttling", "IDPCommunicationError"),  # of STS, when boto3 asks it for a role's credentials
    ],
)
def test_a_client_error_that_may_pass_is_tried_again(code: str) -> None:
    with pytest.raises(StorageUnavailable, match=rf"s3://b/k .*failed, after retries: .*{code}"):
        refusing(400, code).upload("k", b"1234")


@pytest.mark.usefixtures("s3_credentials")
def test_another_client_error_is_final() -> None:
    with pytest.raises(StorageDenied, match=r"refused the request: .*InvalidArgument"):
        refusing(400, "InvalidArgument").upload("k", b"1234")


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("address", ["minio:9000", "http://", "http://minio:99999", "http://[::1"])
def test_an_endpoint_that_is_no_address_gets_a_sentence(scheme: str, address: str) -> None:
    with pytest.raises(StorageDenied, match=r"checkpoint\.endpointURL .* is '.*', which is not a valid address"):
        open_storage(f"{scheme}://b/run", endpoint_url=address)


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_ENDPOINT_URL_S3", "http://minio_store:9000", "Invalid endpoint: http://minio_store:9000"),
        ("AWS_MAX_ATTEMPTS", "many", "invalid literal for .* 'many'"),
    ],
)
def test_a_setting_that_the_client_refuses_gets_a_sentence(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StorageDenied, match=rf"'s3://b/run' can't be opened: .* variables of boto3\. \({words}\)"):
        open_storage("s3://b/run")


def test_bytes_that_arrive_damaged_from_google_may_be_whole_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> bytes:
        raise DataCorruption(None, "Checksum mismatch:\n\nAAAA")

    monkeypatch.setattr("google.cloud.storage.Blob.download_as_bytes", download)
    with pytest.raises(StorageUnavailable, match="gs://b/HEAD was damaged on the way: Checksum mismatch: AAAA"):
        GcsStorage(bucket="b", endpoint_url="http://127.0.0.1:9").get("HEAD")


class DamagedBody(io.RawIOBase):
    """A body in whose TLS record a bit has flipped."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        raise ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] decryption failed or bad record mac")


class DamagingServer(Server):
    """Answers each request with a body that arrives damaged."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    def answer(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        self.requests.append(request)
        headers = {"ETag": '"1"', "Content-Length": "100"}
        body = urllib3.HTTPResponse(DamagedBody(), headers, self._status, preload_content=False)
        return AWSResponse(request.url, self._status, headers, body)


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize(("status", "tries", "said"), [(206, 4, "broke off"), (404, 1, "gave an invalid answer")])
def test_a_damaged_record_of_tls_may_be_whole_the_next_time(status: int, tries: int, said: str) -> None:
    reads: list[Callable[[S3Storage], object]] = [
        lambda storage: storage.get("k"),
        lambda storage: storage.read_into("k", 0, memoryview(bytearray(100))),
    ]
    for read in reads:
        server, storage = DamagingServer(status), S3Storage(bucket="b", endpoint_url="https://127.0.0.1:9")
        storage._client.meta.events.register("before-send.s3", server.answer)
        with pytest.raises(StorageUnavailable, match=rf"s3://b/k .*{said}: .*BAD_RECORD_MAC"):
            read(storage)
        assert len(server.requests) == tries


@pytest.mark.usefixtures("s3_credentials")
def test_a_server_that_knows_no_bucket_differs_from_a_missing_object() -> None:
    storage = refusing(404, "404")
    with pytest.raises(ObjectNotFound):
        storage.get("k")
    for use in (
        lambda: list(storage.list("")),
        lambda: storage.delete(["k"]),
        lambda: storage.abandon_uploads("", lambda _: True),
    ):
        with pytest.raises(StorageUnavailable, match=r"No bucket answers at s3://b at .*endpointURL .*\(404\)"):
            use()


@pytest.mark.usefixtures("s3_credentials")
def test_an_access_point_that_does_not_exist_gets_a_sentence() -> None:
    with pytest.raises(StorageMissing, match=r"The access point s3://b at .* does not exist: create it"):
        refusing(404, "NoSuchAccessPoint").get("k")


@pytest.mark.usefixtures("s3_credentials")
def test_an_object_that_may_not_be_deleted_is_named_by_its_address() -> None:
    storage = S3Storage(bucket="b", prefix="run", endpoint_url="http://127.0.0.1:9", max_attempts=1)
    error = b"<Error><Key>run/attempts/k</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"

    def refuse(request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        return AWSResponse(request.url, 200, {}, Answer(b"<DeleteResult>" + error + b"</DeleteResult>"))

    storage._client.meta.events.register("before-send.s3", refuse)
    with pytest.raises(StorageDenied, match=r"^s3://b/run/attempts/k at \S+ could not be deleted: Access Denied$"):
        storage.delete(["attempts/k"])


def refusing(status: int, code: str) -> S3Storage:
    """A store that answers everything with this error."""
    storage = S3Storage(bucket="b", endpoint_url="http://127.0.0.1:9", max_attempts=1)

    def refuse(request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        return AWSResponse(request.url, status, {}, Answer(body))

    storage._client.meta.events.register("before-send.s3", refuse)
    return storage


def is_unsigned(request: AWSPreparedRequest) -> bool:
    return bool(request.headers["X-Amz-Content-SHA256"] == b"UNSIGNED-PAYLOAD")


@pytest.mark.parametrize(
    ("profile", "sentence"),
    [
        ("credential_process = false", "Error when retrieving credentials"),
        (
            "credential_process = cat {folder}/expired",
            "No valid credentials for .*: check the job's service account and its role",
        ),
        (
            "role_arn = arn:aws:iam::1:role/r\nweb_identity_token_file = {folder}/nothing",
            "No valid credentials for .*nothing",
        ),
    ],
    ids=["fails", "expired", "no token"],
)
def test_credentials_of_aws_that_cannot_be_had_get_a_sentence(
    profile: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired = {"AccessKeyId": "a", "SecretAccessKey": "b", "SessionToken": "c", "Expiration": "2001-01-01T00:00:00Z"}
    (tmp_path / "expired").write_text(json.dumps({"Version": 1, **expired}))
    (tmp_path / "config").write_text(f"[default]\n{profile.format(folder=tmp_path)}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "nothing"))
    with pytest.raises(StorageUnavailable, match=sentence):
        S3Storage(bucket="b", endpoint_url="http://127.0.0.1:9", max_attempts=1).put("k", b"")


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the environment nor in files, and no metadata server."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("google.auth.compute_engine._metadata.is_on_gce", lambda **_: False)


@pytest.mark.usefixtures("no_credentials")
@pytest.mark.parametrize("store", [S3Storage, GcsStorage])
def test_credentials_that_are_not_found_get_a_sentence_and_may_come_later(store: Callable[..., Any]) -> None:
    with pytest.raises(CredentialsMissing, match=r"No credentials for (s3|gs)://b/.*: give the job's service"):
        store(bucket="b").put("k", b"")


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("asked", [None, "2"], ids=["by default", "as the user asks"])
def test_a_metadata_server_of_aws_has_time_to_answer(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_METADATA_SERVICE_TIMEOUT", "AWS_METADATA_SERVICE_NUM_ATTEMPTS"):
        monkeypatch.setenv(name, asked) if asked else monkeypatch.delenv(name, raising=False)
    fetchers: list[dict[str, Any]] = []
    monkeypatch.setattr("botocore.credentials.InstanceMetadataFetcher", lambda **given: fetchers.append(given))
    s3_client(region_name="us-east-1")
    (given,) = fetchers
    assert (given["timeout"], given["num_attempts"]) == ((2, 2) if asked else (5, 3))


FEDERATED = {
    "type": "external_account",
    "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
    "token_url": "https://sts.googleapis.com/v1/token",
    "credential_source": {"file": "/nothing"},
}
OF_A_USER = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}


@pytest.fixture
def identity(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's credentials are those of the parameter, which have no project."""
    for name in ("GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "identity.json").write_text(json.dumps(request.param))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "identity.json"))


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("identity", [FEDERATED], indirect=True)
def test_credentials_of_google_that_cannot_be_had_get_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageUnavailable, match=r"No valid credentials for gs://b/.*nothing"):
        GcsStorage(bucket="b")  # asks for the project
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")
    storage = GcsStorage(bucket="b")
    for use in USES:
        with pytest.raises(StorageUnavailable, match=r"No valid credentials for gs://b/.*nothing"):
            use(storage)


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize(
    "identity", [OF_A_USER, FEDERATED | {"audience": "//iam.googleapis.com/pools/p"}], indirect=True
)
def test_credentials_of_google_need_no_project() -> None:
    GcsStorage(bucket="b")


USES: list[Callable[[GcsStorage], object]] = [
    lambda storage: storage.put("k", b""),
    lambda storage: storage.put("k", b"", if_match="1"),
    lambda storage: storage.upload("k", bytes(9 << 20)),
    lambda storage: storage.get("k"),
    lambda storage: list(storage.list("")),
    lambda storage: storage.delete(["k"]),
]


def test_s3_clients_share_what_is_read_but_not_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = []
    for user in ("first", "second"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", user)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        client = s3_client(region_name="us-east-1")
        urls.append(client.generate_presigned_url("get_object", Params={"Bucket": "b", "Key": "k"}))
    assert "first" in urls[0]
    assert "second" in urls[1]
