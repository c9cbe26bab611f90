"""What one gloo rank does in the tests of checkpoints.

test_checkpoint_ranks.py starts it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import CheckpointError, RanksDiffer, SaveFailed, StorageUnavailable
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.manifest import BLOCK_BYTES
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.world.launch import gloo_group


class Net(nn.Module):
    """Shapes that don't divide: over four ranks, some shards are empty."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 3), nn.Linear(3, 64), nn.Linear(64, 7)])
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.gain


@dataclass(kw_only=True)
class Rank:
    """A rank's model, optimizer and checkpointer."""

    uri: str
    folder: Path
    rank: int
    world_size: int
    generation: int
    ddp: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(self.generation)
        self.model: nn.Module = Net()
        if self.ddp:
            self.model = DistributedDataParallel(self.model)
        else:
            for layer in self.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.storage = open_storage(self.uri, endpoint_url=os.environ.get("TEST_ENDPOINT"))
        self.checkpointer = self.new_checkpointer()

    def new_checkpointer(self, **settings: Any) -> Checkpointer:
        return Checkpointer(
            self.storage,
            generation=self.generation,
            attempt_id="test",
            rank=self.rank,
            world_size=self.world_size,
            process_group=gloo_group(),
            **settings,
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(4, 7)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": {"steps": (1, 2.5)}}

    def save(self, step: int) -> Any:
        return self.checkpointer.save(self.state(), step=step, **self._values())

    def save_in_background(self, step: int) -> Any:
        return self.checkpointer.save_in_background(self.state(), step=step, **self._values())

    def _values(self) -> dict[str, Any]:
        large = torch.full((1 << 15,), float(self.rank))
        state = {"rank": self.rank, "rng": torch.get_rng_state().numpy().tobytes(), "large": large}
        return {"extra": {"loss": 0.5}, "rank_state": state}

    def whole(self) -> dict[str, torch.Tensor]:
        """The unsharded state, on every rank, by name."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=False)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        moments = {f"{fqn}.{kind}": m for fqn, s in optimizer["state"].items() for kind, m in s.items()}  # type: ignore[union-attr]
        return cast(dict[str, torch.Tensor], {**model, **moments})


def save(me: Rank) -> None:
    """Make two commits, and write beside them what they should hold.

    The second save is in the background.
    """
    assert me.checkpointer.latest() is None
    me.checkpointer.prepare(me.state())
    for step, save in ((3, me.save), (5, me.save_in_background)):
        me.train(2)
        handle = save(step)
        expected = me.whole()
        if me.rank == 0:
            torch.save(expected, me.folder / f"step-{step}.pt")
        if handle.wait() is not None:
            assert handle.commit.step == step
        assert (handle.commit is not None) == (me.rank == 0 or step == 3)
        # Training over the staged state must not change what is being stored.
        me.train(1)


def load(me: Rank) -> None:
    """The newest commit is there bit by bit, and training can go on from it."""
    newest = me.checkpointer.latest()
    assert newest is not None
    me.train(1)
    state = me.state()
    loaded = me.checkpointer.load(lambda _: state, newest, ranks=range)
    for number, of_rank in enumerate(loaded.rank_states):
        large = codec.join(of_rank, loaded.rank_tensors)["large"]
        assert torch.equal(large, torch.full((1 << 15,), float(number)))
    set_state_dict(me.model, me.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    expected = torch.load(me.folder / f"step-{newest.step}.pt", weights_only=True)
    found = me.whole()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert loaded.extra == {"loss": 0.5}
    assert state["schedule"] == {"steps": (1, 2.5)}
    same_world = os.environ["TEST_SAVED_BY"] == str(me.world_size)
    assert (loaded.rank_state is not None) == same_world
    if loaded.rank_state is not None:
        assert loaded.rank_state["rank"] == me.rank
        rng = torch.frombuffer(bytearray(loaded.rank_state["rng"]), dtype=torch.uint8)
        torch.set_rng_state(rng)
    me.train(1)


class FailingStorage:
    """A store whose uploads fail on this rank."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def upload(self, key: str, data: Any) -> None:
        raise StorageUnavailable("the disk of rank 1 is full")


class UnreachableStorage(FailingStorage):
    """A store to which this rank can't write at all.

    Writing its receipt fails with an error that nobody expects.
    """

    def put(self, key: str, data: Any, **condition: Any) -> str:
        raise RuntimeError("rank 1 is cut off")


class ForgetfulStorage(FailingStorage):
    """Stores the first object that is put, and denies it; stores no other."""

    puts = 0

    def upload(self, key: str, data: Any) -> None:
        self._inner.upload(key, data)

    def put(self, key: str, data: Any, **condition: Any) -> str:
        self.puts += 1
        if self.puts == 1:
            self._inner.put(key, data, **condition)
        raise StorageUnavailable("rank 1 got no answer")


def one_rank_is_cut_off(me: Rank) -> None:
    """A save is given up on all ranks if one of them can't write to the store.

    That rank can't say so in the store, where rank 0 would wait for its receipt. The ranks report it to each other.
    """
    me.checkpointer.latest()
    if me.rank == 1:
        me.storage = UnreachableStorage(me.storage)
    me.checkpointer = me.new_checkpointer()
    with pytest.raises(SaveFailed, match="given up, because rank 1 failed: the disk of rank 1 is full"):
        me.save(10)
    in_background = me.save_in_background(20)
    in_background.join(0.0 if me.rank == 0 else None)
    assert me.checkpointer.has_failed == (me.rank == 1)
    me.checkpointer.share_failures(None)
    assert not me.checkpointer.has_failed
    with pytest.raises((SaveFailed, StorageUnavailable), match="the disk of rank 1 is full"):
        in_background.wait()
    before = me.save_in_background(30)
    assert before is not None
    me.checkpointer.settle()  # as before a roll-back
    assert before.done
    assert me.checkpointer.latest() is None


def one_rank_fails(me: Rank) -> None:
    """All ranks learn of the failure at once, and the next save is fine."""
    me.checkpointer.latest()
    healthy = me.storage
    if me.rank == 1:
        me.storage = FailingStorage(healthy)
    me.checkpointer = me.new_checkpointer()
    with pytest.raises((SaveFailed, StorageUnavailable), match="the disk of rank 1 is full"):
        me.save(10)
    assert me.checkpointer.latest() is None
    assert [key for key, _ in healthy.list("attempts/") if key.endswith(".data")] == []  # nothing fills the disk
    me.storage = healthy
    me.checkpointer = me.new_checkpointer(retention=Retention(last=1))
    assert me.save(10).commit.step == 10


def one_answer_is_lost(me: Rank) -> None:
    """A step is not saved again if a receipt is stored but its answer is lost.

    Rank 1 can't know that its receipt is stored. Rank 0 commits.
    """
    me.checkpointer.latest()
    if me.rank == 1:
        me.storage = ForgetfulStorage(me.storage)
    me.checkpointer = me.new_checkpointer()
    in_background = me.save_in_background(10)
    in_background.join()
    assert (in_background.error is None) == (me.rank == 0)
    assert me.save(10) is in_background
    assert in_background.wait().step == 10


def unsupported_on_one_rank(me: Rank) -> None:
    """A rank that can't even begin doesn't leave the others waiting."""
    state: dict[str, Any] = {"bad": object()} if me.rank == 1 else {"good": 1}
    with pytest.raises(CheckpointError, match=r"'bad' is a builtins\.object"):
        me.checkpointer.save_in_background(state, step=1)


class SlowStorage(FailingStorage):
    """A store whose uploads wait for a file to appear."""

    gate: Path

    def upload(self, key: str, data: Any) -> None:
        while not self.gate.exists():
            pass
        self._inner.upload(key, data)


def busy(me: Rank) -> None:
    """All ranks skip a save in the background while one rank still uploads.

    A save that commits waits for the upload.
    """
    slow = SlowStorage(me.storage)
    slow.gate = me.folder / "gate"
    if me.rank == 1:
        me.storage = slow
    me.checkpointer = me.new_checkpointer()
    first = me.save_in_background(10)
    assert first is not None
    assert me.save_in_background(11) is None
    dist.barrier()
    if me.rank == 1:
        slow.gate.touch()
    assert me.save(12).commit.step == 12
    head = me.checkpointer.latest()
    assert head is not None
    assert head.step == 12
    assert first.done
    # The same step again, saved in the background and finished on some ranks only: one answer for all.
    again = me.save_in_background(20)
    if me.rank == 0:
        again.wait()
    committed = me.save(20)
    assert committed.commit.step == 20
    assert committed is again


class HaltingStorage(FailingStorage):
    """A store that takes the first piece of an upload, and waits for a file to appear before it takes more."""

    gate: Path

    def upload(self, key: str, data: Any) -> None:
        pieces = iter(data)
        next(pieces)
        while not self.gate.exists():
            pass
        self._inner.upload(key, data)


def one_rank_stages_in_pieces(me: Rank) -> None:
    """A rank without memory holds its step until its bytes are stored; the commit is as of any rank.

    A save that is given up reads nothing any more of what the next step changes.
    """
    me.checkpointer.latest()
    settings: dict[str, Any] = {"piece_bytes": BLOCK_BYTES}
    if me.rank == 1:
        settings["free_bytes"] = lambda: 0
    healthy, me.checkpointer = me.storage, me.new_checkpointer(**settings)
    tensors = {name: torch.arange(3 * BLOCK_BYTES // 4 + 5, dtype=torch.float32) for name in ("a", "b")}
    state: dict[str, Any] = {"model": tensors}
    me.checkpointer.prepare(state)
    assert (me.checkpointer.pieces_of is not None) == (me.rank == 1)
    handle = me.checkpointer.save_in_background(state, step=1)
    assert handle is not None
    for tensor in tensors.values():
        tensor.zero_()
    handle.join()
    newest = me.checkpointer.latest(verify=True)
    assert newest is not None
    assert newest.step == 1
    me.checkpointer.load(lambda _: state, newest)
    for tensor in tensors.values():
        assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.float32))

    halting = HaltingStorage(healthy)
    halting.gate = me.folder / "halting"
    if me.rank == 1:
        me.storage = halting
    me.checkpointer = me.new_checkpointer(**settings)
    with pytest.raises(SaveFailed, match="no receipt came in time from rank 1"):
        me.checkpointer.save(state, step=2, deadline_seconds=0.5)
    if me.rank == 1:
        halting.gate.touch()
    me.checkpointer.settle()
    assert me.checkpointer._current is not None
    assert "given up" in str(me.checkpointer._current.error)
    assert me.checkpointer.latest() == newest


def frozen_weights_change(me: Rank) -> None:
    """All ranks save a frozen weight whose change one of them notices.

    The ranks share out which of the weights they check. The next generation refers to the weights that never changed,
    and reports on all ranks what it replaced.
    """
    names = [f"w{number}" for number in range(8)]
    frozen = {f"model.{name}" for name in names}
    state: dict[str, Any] = {"model": {name: torch.zeros(100) for name in names}, "trained": torch.zeros(10)}

    def save(checkpointer: Checkpointer, state: dict[str, Any], step: int) -> Commit:
        saved = checkpointer.save(state, step=step, frozen=frozen)
        assert saved.commit is not None
        return saved.commit

    me.checkpointer.latest()
    base = save(me.checkpointer, state, 1).attempt
    for step, changed in enumerate(names[1:], start=2):
        state["model"][changed] += step
        commit = save(me.checkpointer, state, step)
        assert commit.needs == (base,)
    resumed = me.new_checkpointer()
    into: dict[str, Any] = {"model": {n: torch.full((100,), -1.0) for n in names}, "trained": torch.ones(10)}
    assert resumed.load(lambda _: into, commit, frozen=frozen).replaced == ("model.w0",)
    assert all(torch.equal(into["model"][name], state["model"][name]) for name in names)
    assert save(resumed, into, 20).needs == (base,)


def odd_state(which: int) -> dict[str, Any]:
    """A state, with one thing changed."""
    big = torch.arange(300_000, dtype=torch.float32)
    state: dict[str, Any] = {"model": {"big": big, "small": torch.ones(3), "count": torch.tensor(7)}}
    state["optimizer"] = {"state": {"big": {"moment": torch.zeros(5)}}, "groups": [{"lr": 0.1, "on": True}]}
    model, group, states = state["model"], state["optimizer"]["groups"][0], state["optimizer"]["state"]
    changes = [
        lambda: None,
        lambda: big[-1].add_(1e6),
        lambda: model["count"].add_(1),
        lambda: states["big"]["moment"][2].fill_(1e-30),
        lambda: states.update(of_rank_1={"moment": torch.zeros(5)}),
        lambda: group.update(lr=0.2),
        lambda: group.update(on=False),
        lambda: model.update(small=torch.ones(3, dtype=torch.float64)),
    ]
    changes[which]()
    return state


def differing(me: Rank) -> None:
    """What a commit holds once, and the ranks have differently, is named on all ranks, and nothing is committed."""
    names = ["model.big", "model.count", "optimizer.state.big.moment", "optimizer.state.of_rank_1.moment"]
    names += ["optimizer.groups.0.lr", "optimizer.groups.0.on", "model.small"]
    for number, name in enumerate(names, start=1):
        own = number if me.rank == 1 else 0
        for save in (me.checkpointer.save_in_background, me.checkpointer.save):
            with pytest.raises(RanksDiffer, match=rf"^Rank 1 has another {name} than rank 0, and a commit holds one"):
                save(odd_state(own), step=1)
        with pytest.raises(RanksDiffer, match=name):
            me.checkpointer.prepare(odd_state(own), frozen=["model.big"])
    hybrid = init_device_mesh("cpu", (2, 1))

    def of_replica(value: float) -> dict[str, Any]:
        local = torch.full((4, 2), 1.0)
        local[2, 1] = value
        return {"model": {"w": DTensor.from_local(local, hybrid, [Replicate(), Shard(0)], run_check=False)}}

    with pytest.raises(RanksDiffer, match=r"^Rank 1 has another model\.w than rank 0"):
        me.checkpointer.save(of_replica(float(me.rank)), step=1)
    extra = {"clock": float(me.rank), "of_script": {"best": [1, 2, me.rank]}}
    with pytest.raises(RanksDiffer, match=r"another of_script\.best\.2 than rank 0"):
        me.checkpointer.save(odd_state(0), step=1, extra=extra, alike=[("of_script",)])
    assert me.checkpointer.latest() is None
    # Rank 0's clock counts, and processors of different kinds round differently.
    rounded = odd_state(0)
    rounded["model"]["big"] *= 1 + 1e-7 * me.rank
    rounded["optimizer"]["groups"][0]["lr"] *= 1 + 1e-15 * me.rank
    assert me.checkpointer.save(rounded, step=1, extra=extra).commit is not None


def agreement(me: Rank) -> None:
    """One start of the processes for all of these; each has a store of its own."""
    for scenario in (
        one_rank_fails,
        one_rank_is_cut_off,
        one_answer_is_lost,
        unsupported_on_one_rank,
        busy,
        one_rank_stages_in_pieces,
        frozen_weights_change,
        differing,
    ):
        scenario(replace(me, uri=f"{me.uri}/{scenario.__name__}"))


SCENARIOS = {scenario.__name__: scenario for scenario in (save, load, agreement)}


def main(
    scenario: str,
    uri: str,
    folder: Path,
    rank: int,
    world_size: int,
    generation: int,
    log: Path,
    environment: dict[str, str],
) -> None:
    """Run a scenario as one rank.

    `folder` is for what the scenarios expect of each other, `log` for what this rank prints.
    """
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(environment)
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous-{generation}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    SCENARIOS[scenario.removesuffix("_ddp")](
        Rank(
            uri=uri,
            folder=folder,
            rank=rank,
            world_size=world_size,
            generation=generation,
            ddp=scenario.endswith("_ddp"),
        )
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**RANK_SETTINGS)  # type: ignore[name-defined]  # noqa: F821
