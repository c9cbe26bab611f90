"""A restore of etcd from a backup, while a job trains a later generation.

The backup knows an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from cluster_fixtures import processes_of
from e2e.rehearsal import Rehearsal, command_lines, kill, rehearsal
from etcd import Etcd
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.stores.uri import open_storage
from spottrain_local.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(240)]

# The on-demand member stays, and the backup knows it. The spot member is replaced, so the backup knows another one.
ONE_OF_EACH = {
    "nodes": {"min": 2, "max": 2},
    "capacity": {"onDemand": {"min": 1, "max": 1}, "spot": {"max": 1}},
}


@dataclass(slots=True, kw_only=True)
class Commits:
    """What HEAD in the store names: generation and step, each time that it was read."""

    uri: str
    seen: list[tuple[int, int]] = field(default_factory=list)

    def have(self, generation: int) -> bool:
        """Whether the newest commit is of this generation, or of a later one."""
        head = read_head(open_storage(self.uri))
        newest = head.newest if head is not None else None
        self.seen.append((newest.generation, newest.step) if newest is not None else (0, 0))
        return self.seen[-1][0] >= generation


def kill_operator(run: Rehearsal) -> None:
    found = processes_of(run.cluster.layout.root)
    [operator] = [p for p, line in zip(found, command_lines(found), strict=True) if "spottrain_operator" in line]
    kill(operator)


def test_no_commit_is_lost_when_etcd_goes_back_to_a_backup(
    operator_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in operator_cluster.running_status()["store"].items():
        monkeypatch.setenv(name, value)
    commits = Commits(uri="s3://checkpoints/restored")
    etcd, backup = Etcd(cluster=operator_cluster), tmp_path / "backup.db"
    with rehearsal(operator_cluster, "restored", tmp_path, members=2, **ONE_OF_EACH) as run:
        etcd.save(backup)
        with run.incident("one node, 30 s of notice, after the backup"):
            run.preempt(run.wait_for_spot_nodes(), 30)
        run.bring_back()
        for bump, operator, meanwhile in (
            (1_000_000_000, "runs on", None),
            (2_000_000_000, "is killed", partial(kill_operator, run)),
        ):
            newest = run.generation().number
            run.wait("the newest generation commits", partial(commits.have, newest))
            with run.incident(f"etcd is restored, and the operator {operator}"):
                etcd.restore(backup, bump=bump, meanwhile=meanwhile)
            run.wait("the next generation commits", partial(commits.have, newest + 1))
            assert run.evidence[-1].redone == 0, run.evidence[-1].row()
            assert [(t.generation, t.reason) for t in run.status().transitions] == [(newest, "StatusRestored")]
            [told] = [message for _, reason, message in run.events() if reason == "StatusRestored"]
            assert told == (
                f"Generation {newest} drains: the job's status went back to generation 1, as after a restore from a "
                "backup"
            )
        status = run.finish()
        commits.have(newest + 1)
    assert commits.seen == sorted(commits.seen)
    assert (status.failures, status.steps_redone) == (0, 0)
