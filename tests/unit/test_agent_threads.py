"""Ranks compute with their share of the container's processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lone_member
from forked_programs import run_forked
from spottrain_agent import threads
from spottrain_agent.generation_run import GenerationRun
from spottrain_agent.threads import ENV_THREADS, share_of_quota
from spottrain_api.settings.entrypoint import Entrypoint


@pytest.mark.parametrize(
    ("files", "num_ranks", "share"),
    [
        pytest.param({"cpu.max": "800000 100000\n"}, 2, 4, id="v2"),
        pytest.param({"cpu.max": "250000 100000\n"}, 2, 1, id="fraction"),
        pytest.param({"cpu.max": "100000 100000\n"}, 4, 1, id="fewer than ranks"),
        pytest.param({"cpu.max": "max 100000\n"}, 1, 1, id="no limit"),
        pytest.param({"cpu/cpu.cfs_quota_us": "600000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1, 6, id="v1"),
        pytest.param({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1, 1, id="v1 no limit"),
        pytest.param({"cpu.max": "many\n"}, 1, 1, id="unreadable"),
        pytest.param({}, 1, 1, id="no cgroup"),
    ],
)
def test_the_share_is_of_the_containers_limit(
    files: dict[str, str], num_ranks: int, share: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert share_of_quota(num_ranks, tmp_path) == share


@pytest.mark.parametrize(("own", "wanted"), [(None, "3"), ("7", "7")])
def test_ranks_are_given_their_share_unless_the_job_sets_a_number(
    own: str | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_THREADS, raising=False)
    if own is not None:
        monkeypatch.setenv(ENV_THREADS, own)
    (tmp_path / "cpu.max").write_text("600000 100000\n")
    monkeypatch.setattr(threads, "_CGROUP", tmp_path)
    run = GenerationRun(
        lone_member.generation(Entrypoint(module="train"), processes_per_node=2), lone_member.settings(tmp_path), 30.0
    )
    assert run._environment().get(ENV_THREADS) == wanted


def test_a_rank_computes_with_that_number_although_the_zygote_has_one(fork: Any, tmp_path: Path) -> None:
    """OpenMP reads the variable when torch is imported."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, torch; from spottrain_agent.threads import use_threads; before = torch.get_num_threads();"
        f"os.environ['{ENV_THREADS}'] = '3'; use_threads(); print(before, torch.get_num_threads())"
    )
    ran = run_forked(fork, script)
    assert ran.stdout.split() == ["1", "3"]
