"""What differs on a GPU, as far as a machine without one can show it."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spottrain.data.to_device import to_device
from spottrain.engines.adopted import check_spread
from spottrain.engines.ddp import settle_buckets
from spottrain.world import launch as launch_module
from spottrain.world.failures import UserError, failure_of
from spottrain.world.launch import Launch, join_world
from spottrain_api.contract.names import ENV_GPUS
from spottrain_api.contract.reports import FailureReason

META = torch.device("meta")
ON_THE_CPU = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), run_dir=None)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_buckets_of_a_model_on_a_device_are_settled(world_of_one: None) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    ddp = DistributedDataParallel(model)
    # As on a GPU, where it moves inputs to its device, and can't do without any.
    ddp.device_ids = [0]
    settle_buckets(ddp, model)
    assert ddp.reducer._rebuild_buckets(), "the order of the first backward pass was not noted"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert ddp(torch.ones(2, 3)).shape == (2, 1)


class Encoding(UserDict[str, Any]):
    """As a tokenizer's BatchEncoding, which is no dict."""


class Ragged:
    """A collate function's batch that gets to a device only by its own method."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = rows

    def to(self, device: torch.device) -> Ragged:
        return Ragged([row.to(device) for row in self.rows])


def test_batches_of_any_kind_get_to_the_device() -> None:
    batch = {
        "mapping": Encoding(ids=torch.ones(2)),
        "object": Ragged([torch.ones(1)]),
        "packed": nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
        "rest": [(torch.ones(1), "text", 3)],
    }
    found = to_device(batch, META)
    assert found["mapping"]["ids"].device == META
    assert found["object"].rows[0].device == META
    assert found["packed"].data.device == META
    assert found["rest"][0][0].device == META
    assert found["rest"][0][1:] == ("text", 3)


class Fields(dict[str, Any]):
    """Its keys are attributes, too, as people write it."""

    __getattr__ = dict[str, Any].__getitem__


class Edge(NamedTuple):
    to: Any


def test_a_batch_with_fields_of_its_own_keeps_its_class() -> None:
    batch: dict[str, Any] = {
        "fields": Fields(ids=torch.ones(2)),
        "edge": Edge(to=lambda: "no tensor"),
        "type": nn.Linear,
    }
    found = to_device(batch, META)
    assert found["fields"].ids.device == META
    assert batch["fields"].ids.device.type == "cpu"
    assert found["edge"].to() == "no tensor"
    assert found["type"] is nn.Linear


def test_one_process_with_several_gpus_is_refused_with_a_sentence() -> None:
    parallel = nn.DataParallel(nn.Linear(2, 2))
    parallel.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"over 2 GPUs .* torchrun and one rank per GPU"):
        check_spread("auto", parallel, 1)


def test_more_ranks_than_gpus_are_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launch = Launch(
        rank=5, local_rank=1, world_size=8, local_world_size=4, device=torch.device("cuda", 1), run_dir=None
    )
    with pytest.raises(UserError, match=r"runs 4 ranks and has 1 visible GPU\(s\)") as refused:
        join_world(launch)
    assert "processesPerNode" in str(refused.value)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old (found version 12080)."), "found version 12080"),
        (AssertionError("Torch not compiled with CUDA enabled"), "not compiled with CUDA enabled"),
        (None, "finds no CUDA device"),
    ],
)
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu_unseen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None, reason: str
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(launch_module, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"has a GPU .*nvidia0") as refused:
        join_world(ON_THE_CPU)
    assert reason in str(refused.value)
    assert "/usr/local/nvidia/lib64" in str(refused.value)


@pytest.mark.parametrize(("device", "visible"), [("nvidia0", ""), ("nvidia0", "-1"), ("nvidiactl", "0")])
def test_hidden_gpus_and_nodes_without_one_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, visible: str
) -> None:
    (tmp_path / device).touch()
    monkeypatch.setattr(launch_module, "DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(dist, "init_process_group", Mock())
    assert join_world(ON_THE_CPU).agreement is None


def test_a_pod_that_asked_for_gpus_does_not_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if the container runtime were not NVIDIA's."""
    monkeypatch.setattr(launch_module, "DEVICES", tmp_path)
    monkeypatch.setattr(dist, "init_process_group", Mock())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(ENV_GPUS, "8")
    with pytest.raises(
        UserError, match=r"asked for 8 GPU\(s\), and its container has none.*runtimeClassName"
    ) as refused:
        join_world(ON_THE_CPU)
    assert refused.value.reason is FailureReason.DEVICE_FAILED
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert join_world(ON_THE_CPU).agreement is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv(ENV_GPUS, "0")
    assert join_world(ON_THE_CPU).agreement is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("4", FailureReason.DEVICE_FAILED),
        ("1", FailureReason.INVALID_CONFIGURATION),
        ("", FailureReason.INVALID_CONFIGURATION),
    ],
)
def test_fewer_gpus_than_a_pod_asked_for_are_a_failed_device(
    monkeypatch: pytest.MonkeyPatch, asked: str, reason: FailureReason
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(ENV_GPUS, asked)
    launch = Launch(
        rank=5, local_rank=1, world_size=8, local_world_size=4, device=torch.device("cuda", 1), run_dir=None
    )
    with pytest.raises(UserError) as refused:
        join_world(launch)
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("CUDA error: uncorrectable ECC error encountered", FailureReason.DEVICE_FAILED),
        ("CUDA error: unknown error", FailureReason.DEVICE_FAILED),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", FailureReason.DEVICE_FAILED),
        ("CUDA error: device-side assert triggered", FailureReason.SCRIPT_ERROR),
        ("CUDA error: an illegal memory access was encountered", FailureReason.SCRIPT_ERROR),
    ],
)
def test_errors_of_a_gpu_are_distinguished_from_those_of_a_script(message: str, reason: FailureReason) -> None:
    failure = failure_of(torch.AcceleratorError(message), rank=3)
    assert failure is not None
    assert failure.reason is reason
