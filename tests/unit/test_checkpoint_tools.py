"""`spottrain checkpoints` on a folder: what a person sees.

The checkpoints may be damaged.
"""

from __future__ import annotations

import errno
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import StorageUnavailable
from spottrain.checkpoint.format import manifest
from spottrain.checkpoint.format.commits import Commit, Head
from spottrain.checkpoint.format.manifest import Chunk, Tensor
from spottrain.checkpoint.format.part_reader import PartReader
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.recovery.training_state import model_config
from spottrain_cli.checkpoints import layout
from spottrain_cli.main import main

WEIGHT = torch.arange(12, dtype=torch.bfloat16).view(3, 4)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Commits of steps 10 and 20, and an attempt that was given up."""
    uri = f"file://{tmp_path}/store"
    storage = open_storage(uri)
    saver = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1)
    for step in (10, 20):
        state: dict[str, Any] = {
            "model": {"layer.weight": WEIGHT + step, "steps": torch.tensor(step)},
            "optimizer": {"state.layer.weight.exp_avg": torch.ones(3, 4)},
        }
        extra = {"identity": {"seed": 7}, "model_config": {"model_type": "gpt", "layers": 3}}
        saver.save(state, step=step, extra=extra)
    storage.put("attempts/g000001-s000000030-given-up/rank-00000.data", b"half")
    return uri


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["checkpoints", *arguments])


def damage(uri: str, step: int, name: str = "rank-00000.data") -> None:
    (path,) = Path(uri.removeprefix("file://"), "attempts").glob(f"*-s{step:09d}-*/{name}")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def test_ls(uri: str) -> None:
    result = run("ls", uri)
    assert result.exit_code == 0
    header, newest, before, unfinished = result.output.splitlines()
    assert header.split() == ["Step", "Generation", "Committed", "World", "Size", "Shared"]
    assert newest.split()[0] == "20"
    assert datetime.strptime(newest.split()[2], "%Y-%m-%dT%H:%M:%S%z").tzinfo == UTC
    assert newest.split()[-1] == "newest"
    assert before.split()[0] == "10"
    assert unfinished.startswith("1 attempt under way or given up")
    damage(uri, 10, "manifest.json")
    assert "damaged" in run("ls", uri).output


def test_ls_cuts_no_column_on_a_narrow_terminal(uri: str) -> None:
    result = CliRunner(env={"COLUMNS": "40"}).invoke(main, ["checkpoints", "ls", uri])
    assert result.output == run("ls", uri).output
    assert "…" not in result.output


def test_weights_that_commits_share_are_counted_once(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    saver = Checkpointer(open_storage(uri), generation=1, attempt_id="a", rank=0, world_size=1)
    for step in (10, 20, 30):
        state = {"model": {"base": torch.arange(500_000.0), "adapter": torch.full((50,), float(step))}}
        saver.save(state, step=step, frozen={"model.base"})
    saver.clean_up(Retention())

    _, *rows = run("ls", uri).output.splitlines()
    assert [row.split()[4:] for row in rows] == [
        ["256", "bytes", "2.0", "MB", "newest"],
        ["256", "bytes", "2.0", "MB"],
    ]
    shown = run("show", uri).output
    assert "Written by 1 rank, 256 bytes, under attempts/g000001-s000000030" in shown
    assert "Refers to 2.0 MB of weights that are not trained, under attempts/g000001-s000000010" in shown
    assert run("verify", uri).output == "step 30: whole\nstep 20: whole\n"
    assert run("export", uri, str(tmp_path / "model.safetensors")).exit_code == 0
    exported = load_file(tmp_path / "model.safetensors")
    assert torch.equal(exported["base"], torch.arange(500_000.0))
    assert torch.equal(exported["adapter"], torch.full((50,), 30.0))
    damage(uri, 10, "rank-00000.frozen.data")
    assert "Damaged: 2 of 2 commits" in run("verify", uri).output


def test_help_names_the_commits_that_are_read_without_a_step() -> None:
    for name, commits in (("show", "the newest one"), ("verify", "all commits"), ("export", "the newest one")):
        assert f"Default: {commits}." in run(name, "--help").output, name


def test_show(uri: str) -> None:
    output = run("show", uri, "--step", "10").output
    assert "Step 10 of generation 1" in output
    assert "Written by 1 rank" in output
    assert "model: 2 tensors, 13 numbers (bfloat16, int64)" in output
    assert "model.layer.weight [3, 4]" in output
    assert "identity: {'seed': 7}" in output


def test_show_says_how_the_ranks_had_each_part(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    saver = Checkpointer(open_storage(uri), generation=1, attempt_id="a", rank=0, world_size=1)
    saver.save({"model": {"weight": WEIGHT}}, step=1, rank_state={"random": {}, "parts": {"carried": {"hidden": 1}}})
    output = run("show", uri).output
    assert "model: 1 tensor, 12 numbers (bfloat16), the same on all ranks" in output
    assert "carried: one of each of 1 rank" in output

    halves = [Chunk(rank=rank, begin=0, end=8, offsets=(2 * rank,), lengths=(2,)) for rank in range(2)]
    whole = Chunk(rank=0, begin=0, end=16, offsets=(0,), lengths=(4,))
    sharded, same = (Tensor(dtype="float32", shape=(4,), chunks=tuple(chunks)) for chunks in (halves, [whole]))
    assert layout([sharded, sharded]) == "in shards"
    assert layout([sharded, same]) == "1 of them in shards"


def test_no_name_in_a_store_commands_the_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hostile = "\x1b]0;mine\x07\x1b[2J\x9b31m\r\u202e"
    uri = f"file://{tmp_path}/store"
    saver = Checkpointer(open_storage(uri), generation=1, attempt_id=hostile, rank=0, world_size=1)
    adapter = {"config": {}, "tensors": {"weight": f"weight{hostile}"}}
    extra = {f"note{hostile}": hostile, "peft": {hostile: adapter}}
    saver.save({f"model{hostile}": {"a": WEIGHT}, "model": {f"weight{hostile}": WEIGHT}}, step=1, extra=extra)

    def said() -> str:
        outputs = [run("show", uri), run("verify", uri), run("export", uri, str(tmp_path / "folder"))]
        text = "".join(each.output for each in outputs) + caplog.text
        assert [each for each in text if not each.isprintable() and each != "\n"] == []
        return text

    assert said().count("]0;mine") >= 6
    damage(uri, 1, "manifest.json")
    assert "is not what was committed" in said().replace("\n", " ")
    (tmp_path / "store" / "HEAD").unlink()
    assert "is passed over" in said()


@pytest.mark.parametrize("is_there", [True, False], ids=["damaged", "missing"])
def test_without_head_what_is_whole_is_shown(uri: str, is_there: bool, caplog: pytest.LogCaptureFixture) -> None:
    head = Path(uri.removeprefix("file://"), "HEAD")
    head.unlink()
    if is_there:
        head.write_text("{")
    assert [line.split()[0] for line in run("ls", uri).output.splitlines()[1:3]] == ["20", "10"]
    assert "HEAD of the checkpoint store is missing or damaged." in caplog.text
    result = run("verify", uri)
    assert result.exit_code == 1
    assert "step 20: whole\nstep 10: whole\n" in result.output
    assert "The next job at this URI rebuilds it" in result.output
    assert head.exists() == is_there  # to look at it changes nothing


def test_verify(uri: str) -> None:
    assert run("verify", uri).output == "step 20: whole\nstep 10: whole\n"
    damage(uri, 20)
    result = run("verify", uri)
    assert result.exit_code == 1
    assert "step 20: damaged. attempts/g000001-s000000020" in result.output
    assert "step 10: whole" in result.output
    assert "Damaged: 1 of 2 commits" in result.output
    assert run("verify", uri, "--step", "10").exit_code == 0


def test_export_to_one_file(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert run("export", uri, str(path)).exit_code == 0
    tensors = load_file(path)
    assert tensors.keys() == {"layer.weight", "steps"}
    assert torch.equal(tensors["layer.weight"], WEIGHT + 20)
    assert tensors["steps"].item() == 20


def test_two_exports_of_a_commit_are_the_same_to_the_byte(uri: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(8)]
    for path in paths:
        assert run("export", uri, str(path)).exit_code == 0
    assert len({path.read_bytes() for path in paths}) == 1


def test_export_to_a_hugging_face_folder(uri: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert run("export", uri, str(folder), "--step", "10").exit_code == 0
    assert torch.equal(load_file(folder / "model.safetensors")["layer.weight"], WEIGHT + 10)
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "gpt", "layers": 3}
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json"}


@pytest.mark.parametrize(
    "adapters",
    [
        None,
        {"default": {"config": {}, "tensors": None}},
        {"default": {"config": {}, "tensors": {"a": "base_model.model.layer.lora_A.default.weight", "b": "other"}}},
    ],
    ids=["no-peft", "computed", "other-names"],
)
def test_adapters_that_the_commit_does_not_know_are_not_exported(
    tmp_path: Path, adapters: dict[str, Any] | None
) -> None:
    storage = open_storage(f"file://{tmp_path}/store")
    saver = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1)
    state = {"model": {"base_model.model.layer.lora_A.default.weight": WEIGHT}}
    saver.save(state, step=1, extra={"peft": adapters})
    result = run("export", f"file://{tmp_path}/store", str(tmp_path / "folder"))
    assert result.exit_code == 1
    assert "the commit doesn't say which tensors are its adapters" in result.output.replace("\n", " ")
    assert list((tmp_path / "folder").iterdir()) == []
    assert run("export", f"file://{tmp_path}/store", str(tmp_path / "model.safetensors")).exit_code == 0


@pytest.mark.parametrize("name", ["..", ".", "", "../other", "/other", "other\0"])
def test_no_name_of_an_adapter_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    uri = f"file://{tmp_path}/store"
    saver = Checkpointer(open_storage(uri), generation=1, attempt_id="a", rank=0, world_size=1)
    adapter = {"config": {"of": "the bucket"}, "tensors": {"weight": "weight"}}
    saver.save({"model": {"weight": WEIGHT}}, step=1, extra={"peft": {name: adapter}})
    mine = tmp_path / "mine" / "adapter_config.json"
    mine.parent.mkdir()
    mine.write_text("{}")
    result = run("export", uri, str(mine.parent / "folder"))
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"The commit has adapters whose names can't be names of folders: {name!r}." in result.output
    assert {path.name for path in mine.parent.rglob("*")} == {"adapter_config.json", "folder"}
    assert mine.read_text() == "{}"


def test_to_look_at_a_store_writes_nothing_to_it(uri: str, tmp_path: Path) -> None:
    store = Path(uri.removeprefix("file://"))
    shutil.rmtree(store / ".unfinished")
    (store / ".lock").unlink()
    for path in (store, *store.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in (store, *store.rglob("*"))}
    for command, *more in (["ls"], ["show"], ["verify"], ["export", str(tmp_path / "model.safetensors")]):
        result = run(command, uri, *more)
        assert result.exit_code == 0, result.output
    assert {path: path.stat().st_mtime_ns for path in (store, *store.rglob("*"))} == before


def test_the_configuration_of_a_hugging_face_model_is_kept() -> None:
    class Config:
        def to_json_string(self) -> str:
            return '{"model_type": "gpt", "layers": 3}'

    model = torch.nn.Linear(1, 1)
    assert model_config(model) is None
    model.config = Config()  # type: ignore[assignment]
    assert model_config(model) == {"model_type": "gpt", "layers": 3}


def test_a_damaged_model_is_not_exported(uri: str, tmp_path: Path) -> None:
    damage(uri, 20)
    result = run("export", uri, str(tmp_path / "model.safetensors"))
    assert result.exit_code == 1
    assert "is damaged between bytes" in result.output
    assert not (tmp_path / "model.safetensors").exists()


def test_a_place_that_cannot_be_written_gets_a_sentence(uri: str, tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").touch()
    full = Path("/dev/full") / "model.safetensors"
    for output in (tmp_path / "folder.safetensors", tmp_path / "file", tmp_path / "file" / "m.safetensors", full):
        result = run("export", uri, str(output))
        assert result.exit_code == 1
        assert f"The model could not be written to {output}: " in result.output.replace("\n", " ")
        assert isinstance(result.exception, SystemExit)


def test_an_export_makes_the_folders_to_its_file_and_lets_others_read_it(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "of" / "mine" / "model.safetensors"
    assert run("export", uri, str(path)).exit_code == 0
    beside = tmp_path / "beside"
    beside.touch()
    assert path.stat().st_mode == beside.stat().st_mode
    assert [each.name for each in path.parent.iterdir()] == ["model.safetensors"]


def test_what_a_job_drops_meanwhile_is_not_damaged(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's next commit comes between the reading of HEAD and that of the commit."""

    def choose(head: Head, step: int | None) -> Commit:
        (commit,) = (each for each in head.commits if each.step == step)
        saver = Checkpointer(open_storage(uri), generation=1, attempt_id="a", rank=0, world_size=1)
        saver.save({"model": {"x": torch.ones(1)}}, step=30, extra={})
        saver.clean_up(Retention(last=1))
        return commit

    monkeypatch.setattr("spottrain_cli.checkpoints._choose", choose)
    assert run("verify", uri, "--step", "20").output == "step 20: dropped by the job in the meantime\n"


def test_ls_calls_what_a_job_drops_meanwhile_dropped(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = manifest.read_manifest

    def read_manifest(storage: CheckpointStorage, commit: Commit) -> manifest.Manifest:
        if commit.step == 20:
            saver = Checkpointer(open_storage(uri), generation=1, attempt_id="a", rank=0, world_size=1)
            saver.save({"model": {"x": torch.ones(1)}}, step=30, extra={})
            saver.clean_up(Retention(last=1))
        return read(storage, commit)

    monkeypatch.setattr(manifest, "read_manifest", read_manifest)
    listed = run("ls", uri).output
    assert listed.count("dropped by the job in the meantime") == 2
    assert "damaged" not in listed


def test_verify_says_of_each_commit_at_once_what_it_found(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = PartReader.verify
    calls: list[int] = []

    def fails_later(self: PartReader, number: int) -> None:
        calls.append(number)
        if len(calls) > 1:
            raise StorageUnavailable("The store does not answer.")
        verify(self, number)

    monkeypatch.setattr(PartReader, "verify", fails_later)
    result = run("verify", uri)
    assert result.exit_code == 1
    assert result.output == "step 20: whole\nError: The store does not answer.\n"


def test_an_export_that_gets_no_memory_says_how_much_it_needs(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("spottrain.checkpoint.loading.export.torch.empty", fails)
    result = run("export", uri, str(tmp_path / "model.safetensors"))
    assert result.exit_code == 1
    assert "The model needs 0 MiB of memory, which this process can't get." in result.output


def test_a_tensor_that_no_safetensors_file_can_hold_is_named_before_the_model_is_read(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    saver = Checkpointer(open_storage(uri), generation=1, attempt_id="a", rank=0, world_size=1)
    saver.save({"model": {"weight": WEIGHT, "poles": torch.ones(2, dtype=torch.complex128)}}, step=10, extra={})
    damage(uri, 10)
    result = run("export", uri, str(tmp_path / "model.safetensors"))
    assert result.exit_code == 1
    assert "safetensors files can't hold tensors of complex128, and the model has some: poles. Store" in result.output


def test_a_folder_that_nobody_may_read_gets_a_sentence(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("os.scandir", "pathlib.Path.is_dir"):  # tests may run as root, which may read all
        monkeypatch.setattr(name, denied)
    result = run("ls", uri)
    assert result.exit_code == 1
    assert "store: Permission denied" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("ls", "file:///no/such/folder"), "There is no folder file:///no/such/folder."),
        (("ls", "file://localhost/no/such/folder"), "There is no folder file://localhost/no/such/folder."),
        (
            ("ls", "s3://bucket/x", "--endpoint-url", "host"),
            "(of a command, --endpoint-url) is 'host', which is not a valid",
        ),
        (("ls", "s3://bucket/x", "--endpoint-url", "http://minio_store:9000"), "can't be opened: check"),
        (("ls", "ftp://host/x"), "unknown scheme"),
        (("ls", "file:///no/such/folder#1"), "contains ? or #"),
        (("ls", "s3://[bucket/x"), "'s3://[bucket/x' is not a valid URI: Invalid IPv6 URL."),
        (("ls", "EMPTY"), "There is no commit at"),
        (("show", "URI", "--step", "11"), "There is no commit of step 11. Choose one of these steps: 20, 10."),
    ],
)
def test_mistakes_get_sentences(uri: str, tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    places = {"URI": uri, "EMPTY": f"file://{tmp_path}/empty"}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 1
    assert sentence in result.output
    assert "Traceback" not in result.output
