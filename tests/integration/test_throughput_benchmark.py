"""The benchmark of tokens a second, in a small size on the CPU.

All ways train the same, and the benchmark's sums are right.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import bench_throughput
from benchmarks.memory.cases import Gpt
from benchmarks.throughput import model, ranks
from rich.console import Console
from torch.nn import functional

from forked_ranks import forked_ranks, rank_environments

SCRIPT = Path(__file__).with_name("throughput_script.py")
ROOT = Path(__file__).parents[2]
EVERY = STEPS = 8


def report_of(fork: Any, way: str, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """What the only rank reports."""
    result = folder / "result.json"
    (environment,) = rank_environments(1)
    settings = {
        "environment": environment,
        "root": str(ROOT),
        "args": [way, str(folder), str(steps), str(EVERY), str(result)],
    }
    with forked_ranks(fork, SCRIPT, [settings]) as started:
        pass
    assert started[0].exitcode == 0, way
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def reports(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each way's, of one rank."""
    return {way: report_of(fork, way, tmp_path_factory.mktemp("way")) for way in ranks.WAYS}


def test_all_ways_train_the_same(reports: dict[str, Any]) -> None:
    plain = reports[ranks.PLAIN]
    assert plain["losses"][0] != plain["losses"][1]
    for way, report in reports.items():
        assert report["losses"] == pytest.approx(plain["losses"], rel=1e-3), way
        assert report["tokens"] == STEPS * 2 * 64
    assert {way: report["saved"] for way, report in reports.items()} == {
        ranks.PLAIN: 0,
        ranks.OURS: 0,
        ranks.PLAIN_SAVES: 1,
        ranks.OURS_COMMITS: 1,
    }


def test_commits_that_the_store_no_longer_keeps_count(fork: Any, tmp_path: Path) -> None:
    assert report_of(fork, ranks.OURS_COMMITS, tmp_path, 4 * STEPS)["saved"] == 4


def test_the_arithmetic_is_what_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    shape = model.ON_THE_CPU
    ids = torch.zeros(shape.micro_batch, shape.context, dtype=torch.int64)
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        functional.cross_entropy(Gpt(shape)(ids).flatten(0, 1), ids.flatten()).backward()
    counted = counter.get_total_flops() / ids.numel()
    assert model.flops_per_token(shape) == pytest.approx(counted, rel=0.05)
    assert model.num_parameters(shape) == sum(parameter.numel() for parameter in Gpt(shape).parameters())


@pytest.mark.parametrize(
    ("device_name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("CPU, 2 cores", None),
    ],
)
def test_a_device_has_no_other_devices_peak(device_name: str, peak: float | None) -> None:
    assert model.peak_tflops(device_name) == peak


def test_the_table_has_ratios_to_the_plain_loop(reports: dict[str, Any], tmp_path: Path) -> None:
    arguments = argparse.Namespace(ranks=1, steps=STEPS, every=EVERY)
    taken = {
        way: {**reports[way], "seconds": seconds} for way, seconds in zip(ranks.WAYS, (2, 2.5, 4, 3), strict=True)
    }
    summaries = {way: bench_throughput.summary([report], arguments, 1.0) for way, report in taken.items()}
    assert summaries[ranks.PLAIN]["tokens_per_second"] == STEPS * 2 * 64 / 2
    assert summaries[ranks.PLAIN]["mfu"] == pytest.approx(512 * summaries[ranks.PLAIN]["flops_per_token"] / 1e12)
    console = Console(width=160, record=True)
    console.print(bench_throughput.table(summaries, arguments))
    text = console.export_text()
    assert "80.0 %" in text
    assert bench_throughput.checkpoint_cost(ranks.PLAIN_SAVES, summaries, arguments) == "2000"
    assert bench_throughput.checkpoint_cost(ranks.OURS_COMMITS, summaries, arguments) == "500"
    bench_throughput.plot(summaries, tmp_path / "plot.svg")
    assert "tokens a second" in (tmp_path / "plot.svg").read_text()
