"""Many runs beside each other, compared with the undisturbed ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from benchmarks.scale.api_server import api_server

from crash_points.disturbances import Disturbance
from crash_points.lane import Lane, Outcome

MAX_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A run, and what is wrong with it; empty if nothing is."""

    outcome: Outcome
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        outcome = self.outcome
        text = "; ".join(self.wrong) or ("as it must" if outcome.is_hit else "without a disturbance")
        return f"{outcome.scenario}, {outcome.disturbance} ({outcome.seconds:.0f} s): {text}"


def compared(outcome: Outcome, reference: Outcome) -> Verdict:
    """Compare a run with the undisturbed one of its scenario."""
    wrong = [outcome.error] if outcome.error else []
    if outcome.state:
        wrong += [
            f"{name}: {outcome.state[name]} instead of {value}"
            for name, value in reference.state.items()
            if outcome.state[name] != value
        ]
    return Verdict(outcome=outcome, wrong=tuple(wrong))


@asynccontextmanager
async def lanes(folder: Path, count: int) -> AsyncIterator[list[Lane]]:
    """Run an API server, and so many operators."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(api_server(folder / "cluster"))
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))
        )
        opened = []
        for number in range(count):
            own = folder / f"lane{number}"
            own.mkdir()
            opened.append(await stack.enter_async_context(Lane(server, session, own, f"lane{number}").open()))
        yield opened


async def references(
    on: Sequence[Lane], scenarios: Iterable[str], tell: Callable[[Verdict], None]
) -> Mapping[str, Outcome]:
    """Run each scenario undisturbed."""
    found = {}

    async def one(lane: Lane, scenario: str) -> None:
        found[scenario] = outcome = await lane.run(scenario, Disturbance())
        tell(Verdict(outcome=outcome, wrong=(outcome.error,) if outcome.error else ()))

    await _shared(on, [(scenario,) for scenario in scenarios], one)
    return found


async def disturbed(
    on: Sequence[Lane],
    runs: Iterable[tuple[str, Disturbance]],
    reference: Mapping[str, Outcome],
    tell: Callable[[Verdict], None],
) -> list[Verdict]:
    """Make these runs. One that ended before its disturbance is repeated."""
    verdicts = []

    async def one(lane: Lane, scenario: str, disturbance: Disturbance) -> None:
        for _ in range(MAX_TRIES):
            verdict = compared(await lane.run(scenario, disturbance), reference[scenario])
            if verdict.outcome.is_hit or verdict.wrong:
                break
        verdicts.append(verdict)
        tell(verdict)

    await _shared(on, list(runs), one)
    return verdicts


async def _shared(on: Sequence[Lane], work: Sequence[tuple[object, ...]], do: Callable[..., object]) -> None:
    """Do all the work, one piece at a time in each lane."""
    left = iter(work)

    async def keep_busy(lane: Lane) -> None:
        for piece in left:
            await do(lane, *piece)  # type: ignore[misc]

    async with asyncio.TaskGroup() as group:
        for lane in on:
            group.create_task(keep_busy(lane))
