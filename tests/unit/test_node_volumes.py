"""Volumes as folders: content, live updates, tokens, and their places."""

import errno
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_local.node.addresses import AddressPool
from spottrain_local.node.api import ApiError
from spottrain_local.node.cluster_objects import Token, TokenRequest
from spottrain_local.node.downward import PodPlace
from spottrain_local.node.process_environment import rewriter
from spottrain_local.node.volumes import PodVolumes, VolumeError, VolumeFile, write_atomically

PLACE = PodPlace(node_name="n1", pod_ip="127.1.0.2", host_ip="127.1.0.1", cpu="8", memory="32Gi")


class FakeObjects:
    """One ConfigMap `cm`, one Secret `s`, and numbered tokens.

    The test says how long the tokens live.
    """

    def __init__(self) -> None:
        self.data: dict[str, str] | None = {"a": "1", "b": "2"}
        self.token_requests: list[TokenRequest] = []
        self.token_age = timedelta()
        self.refusals: list[ApiError] = []

    async def config_map(self, namespace: str, name: str) -> dict[str, Any] | None:
        return {"data": self.data} if name == "cm" and self.data is not None else None

    async def secret(self, namespace: str, name: str) -> dict[str, Any] | None:
        return {"data": {"key": "c2VjcmV0"}} if name == "s" else None

    async def token(self, request: TokenRequest) -> Token:
        if self.refusals:
            raise self.refusals.pop()
        self.token_requests.append(request)
        issued = datetime.now(UTC) - self.token_age
        value = f"{request.audience}-{len(self.token_requests)}"
        return Token(value=value, issued=issued, expires=issued + timedelta(seconds=request.expiration_seconds))


def pod(*volumes: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "ns", "uid": "u", "labels": {"a": 'x"y'}}
    return {"metadata": metadata, "spec": {"containers": [{"name": "c"}], "volumes": list(volumes)}}


async def refreshed(root: Path, objects: FakeObjects, *volumes: dict[str, Any]) -> PodVolumes:
    spec = pod(*volumes)
    found = PodVolumes(root, spec, PLACE, objects)
    await found.refresh(spec)
    return found


async def test_config_map_secret_and_empty_dir(tmp_path: Path) -> None:
    await refreshed(
        tmp_path,
        FakeObjects(),
        {"name": "e", "emptyDir": {}},
        {"name": "c", "configMap": {"name": "cm", "items": [{"key": "a", "path": "sub/a.txt"}]}},
        {"name": "s", "secret": {"secretName": "s", "defaultMode": 0o400}},
    )
    assert (tmp_path / "e").is_dir()
    assert (tmp_path / "c/sub/a.txt").read_text() == "1"
    assert not (tmp_path / "c/b").exists()
    assert (tmp_path / "s/key").read_text() == "secret"
    assert (tmp_path / "s/key").stat().st_mode & 0o777 == 0o400


async def test_a_config_map_is_updated_in_place(tmp_path: Path) -> None:
    objects = FakeObjects()
    volume = {"name": "c", "configMap": {"name": "cm"}}
    volumes = await refreshed(tmp_path, objects, volume)
    objects.data = {"a": "3", "d": "4"}
    await volumes.refresh(pod(volume))
    assert {p.name: p.read_text() for p in (tmp_path / "c").iterdir() if p.is_file()} == {"a": "3", "d": "4"}
    assert len([p for p in (tmp_path / "c").iterdir() if p.name.startswith("..2")]) == 1


@pytest.mark.parametrize(
    ("volume", "sentence"),
    [
        ({"configMap": {"name": "nope"}}, 'volume "v": configmap "nope" not found'),
        ({"secret": {"secretName": "nope"}}, 'volume "v": secret "nope" not found'),
        ({"configMap": {"name": "cm", "items": [{"key": "z", "path": "z"}]}}, "non-existent config key: z"),
        ({"persistentVolumeClaim": {"claimName": "x"}}, "persistentVolumeClaim: this node has no such volumes"),
        ({"hostPath": {"path": "/no/such", "type": "Directory"}}, "hostPath /no/such does not exist"),
    ],
)
async def test_what_cannot_be_set_up_is_named(tmp_path: Path, volume: dict[str, Any], sentence: str) -> None:
    with pytest.raises(VolumeError, match=sentence):
        await refreshed(tmp_path, FakeObjects(), {"name": "v", **volume})


async def test_a_token_is_renewed_though_a_config_map_is_gone(tmp_path: Path) -> None:
    objects, token = FakeObjects(), {"serviceAccountToken": {"path": "token"}}
    objects.token_age = timedelta(minutes=50)
    given = [{"name": "c", "configMap": {"name": "cm"}}, {"name": "t", "projected": {"sources": [token]}}]
    volumes = await refreshed(tmp_path, objects, *given)
    objects.data = None
    with pytest.raises(VolumeError, match='volume "c": configmap "cm" not found'):
        await volumes.refresh(pod(*given))
    assert len(objects.token_requests) == 2


async def test_a_host_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    volume = {"name": "v", "hostPath": {"path": str(file), "type": "FileOrCreate"}}
    volumes = await refreshed(tmp_path / "pod", FakeObjects(), volume)
    os.utime(file, (0, 0))
    await volumes.refresh(pod(volume))
    assert file.stat().st_mtime == 0


def test_what_a_full_disk_does_not_take_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path, {"a": VolumeFile(b"1")})
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path, {"a": VolumeFile(b"2")})
    assert sorted(path.name for path in tmp_path.iterdir()) == before


async def test_optional_sources_may_be_absent(tmp_path: Path) -> None:
    await refreshed(tmp_path, FakeObjects(), {"name": "v", "configMap": {"name": "nope", "optional": True}})
    assert list((tmp_path / "v").glob("[!.]*")) == []


def token_volume(**changes: Any) -> dict[str, Any]:
    source = {"path": "token", "audience": "spottrain", "expirationSeconds": 600} | changes
    labels = {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}
    return {"name": "t", "projected": {"sources": [{"serviceAccountToken": source}, {"downwardAPI": labels}]}}


async def test_a_projected_token_is_bound_to_the_pod(tmp_path: Path) -> None:
    objects = FakeObjects()
    await refreshed(tmp_path, objects, token_volume())
    assert (tmp_path / "t/token").read_text() == "spottrain-1"
    assert (tmp_path / "t/labels").read_text() == 'a="x\\"y"'
    assert objects.token_requests == [
        TokenRequest(
            namespace="ns",
            service_account="default",
            pod_name="p",
            pod_uid="u",
            audience="spottrain",
            expiration_seconds=600,
        )
    ]


async def test_a_token_that_is_refused_at_first_is_requested_again(tmp_path: Path) -> None:
    objects = FakeObjects()
    objects.refusals = [ApiError(403, "Forbidden", "no relationship found")] * 2
    await refreshed(tmp_path, objects, token_volume())
    assert (tmp_path / "t/token").read_text() == "spottrain-1"


async def test_a_token_that_stays_refused_is_an_error(tmp_path: Path) -> None:
    objects = FakeObjects()
    objects.refusals = [ApiError(403, "Forbidden", "no such service account")] * 9
    with pytest.raises(ApiError, match="no such service account"):
        await refreshed(tmp_path, objects, token_volume())


@pytest.mark.parametrize(("age", "token"), [(100, "spottrain-1"), (500, "spottrain-2")])
async def test_a_token_is_refreshed_after_80_percent_of_its_life(tmp_path: Path, age: int, token: str) -> None:
    objects = FakeObjects()
    objects.token_age = timedelta(seconds=age)
    volumes = await refreshed(tmp_path, objects, token_volume())
    await volumes.refresh(pod(token_volume()))
    assert (tmp_path / "t/token").read_text() == token


async def test_mounts_are_found_in_their_volumes(tmp_path: Path) -> None:
    volumes = await refreshed(
        tmp_path, FakeObjects(), {"name": "e", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/srv"}}
    )
    container = {
        "volumeMounts": [
            {"name": "e", "mountPath": "/data"},
            {"name": "e", "mountPath": "/data/run", "subPathExpr": "$(ID)"},
            {"name": "h", "mountPath": "/host"},
            {"name": "e", "mountPath": "/dev/shm"},
        ]
    }
    rewrite = rewriter(volumes.mounts(container, tmp_path / "c", {"ID": "7"}))
    assert rewrite("/data/x /data/run/y /host/z /dev/shm/w") == (f"{tmp_path}/e/x {tmp_path}/e/7/y /srv/z /dev/shm/w")
    assert rewrite("/dev/termination-log") == f"{tmp_path}/c/termination"
    assert (tmp_path / "e/7").is_dir()


async def test_mounts_of_kinds_that_the_cluster_fills_are_read_only(tmp_path: Path) -> None:
    volumes = await refreshed(
        tmp_path,
        FakeObjects(),
        {"name": "c", "configMap": {"name": "cm"}},
        {"name": "e", "emptyDir": {}},
    )
    mounts = [
        {"name": "c", "mountPath": "/c"},
        {"name": "e", "mountPath": "/e"},
        {"name": "e", "mountPath": "/r", "readOnly": True},
    ]
    found = volumes.mounts({"volumeMounts": mounts}, tmp_path / "c", {})
    assert {m.target: m.read_only for m in found} == {
        "/dev/termination-log": False,
        "/c": True,
        "/e": False,
        "/r": True,
    }


NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
FILES = st.dictionaries(NAMES, st.binary(max_size=20), max_size=5)


@given(st.lists(FILES, min_size=1, max_size=4))
def test_a_folder_always_shows_exactly_the_newest_files(
    tmp_path_factory: pytest.TempPathFactory, versions: list[dict[str, bytes]]
) -> None:
    folder = tmp_path_factory.mktemp("volume")
    for version in versions:
        files = {name: VolumeFile(content) for name, content in version.items()}
        write_atomically(folder, files)
        assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == version
        assert not write_atomically(folder, files)


def test_addresses_are_given_from_two_upwards_and_reused_last() -> None:
    pool = AddressPool("127.1.0.0/29")
    assert [pool.take(), pool.take("127.1.0.5"), pool.take()] == ["127.1.0.2", "127.1.0.5", "127.1.0.3"]
    pool.give_back("127.1.0.2")
    assert [pool.take() for _ in range(3)] == ["127.1.0.4", "127.1.0.6", "127.1.0.2"]
    with pytest.raises(ValueError, match="no free address"):
        pool.take()
