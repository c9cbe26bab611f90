"""Library and agent distinguish lost peers from a script's own errors alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from spottrain.world.failures import failure_of
from spottrain_agent.records import WorkerEnded
from spottrain_agent.verdict import GenerationObservation, RankObservation, judge
from spottrain_api.contract.reports import FailureReason

CASES: list[tuple[BaseException, bool]] = [
    (
        RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:10120: Connection reset by peer"),
        True,
    ),
    (RuntimeError("[/gloo/transport/tcp/pair.cc:525] Application timeout caused pair closure"), True),
    (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
    (dist.DistBackendError("the watchdog gave up"), True),
    (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), True),
    (dist.DistStoreError("wait timeout after 300000ms"), True),
    (RuntimeError("NCCL communicator was aborted"), True),
    (RuntimeError("Broken pipe"), True),
    (dist.DistBackendError("NCCL error: unhandled system error. Call to recv failed: Connection reset"), True),
    (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
    (dist.DistBackendError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"), False),
    (dist.DistBackendError("NCCL error: invalid usage. Duplicate GPU detected : rank 0 and rank 1"), False),
    (RuntimeError("Distributed package doesn't have NCCL built in"), False),
    (ConnectionResetError(104, "Connection reset by peer"), False),
    (RuntimeError("CUDA error: device-side assert triggered"), False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (torch.OutOfMemoryError("CUDA out of memory"), False),
    (ValueError("gloo"), False),
]


@pytest.mark.parametrize(("error", "lost"), CASES, ids=lambda value: str(value)[:40])
def test_lost_peers_differ_from_the_scripts_own_errors(error: BaseException, lost: bool) -> None:
    expected = FailureReason.LOST_PEER if lost else FailureReason.SCRIPT_ERROR
    by_library = failure_of(error, 0)
    assert by_library is not None
    assert by_library.reason is expected
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    ended = WorkerEnded(exit_code=1, exception=name, message=f"{type(error).__name__}: {error}")
    by_agent = judge(GenerationObservation(ranks=(RankObservation(rank=0, local_rank=0, ended=ended),)))
    assert by_agent is not None
    assert by_agent.failure is not None
    assert by_agent.failure.reason is expected


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            "[/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:30624: Connection reset by peer. This is "
            "typically caused by a remote worker hanging or bugs in the application. GLHF!",
            "Read error [127.0.0.1]:30624: Connection reset by peer",
        ),
        ("Broken pipe.", "Broken pipe"),
    ],
)
def test_both_describe_a_lost_peer_in_the_same_short_words(raised: str, said: str) -> None:
    by_library = failure_of(RuntimeError(raised), 0)
    assert by_library is not None
    ended = WorkerEnded(exit_code=1, exception="builtins.RuntimeError", message=raised)
    by_agent = judge(GenerationObservation(ranks=(RankObservation(rank=0, local_rank=0, ended=ended),)))
    assert by_agent is not None
    assert by_agent.failure is not None
    assert by_agent.failure.message == f"The rank lost another rank ({said})"
    assert by_library.message.endswith(f"{said})")
