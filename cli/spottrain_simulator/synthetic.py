"""Traces that a generator draws by a seed: what clouds are known to do, without being any cloud's record."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from spottrain_simulator.trace import HOUR, Offer, Trace

ON_DEMAND_PRICE, SPOT_PRICE = 3.0, 1.0
HOURS = 96.0
_STEP = HOUR / 6
_Draw = Callable[[random.Random, int], Iterator[tuple[float, int, float]]]


def _outages(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """All nodes of a region go at once, for one to six hours."""
    time = 0.0
    while time < HOURS * HOUR:
        yield time, nodes, SPOT_PRICE
        time += rng.expovariate(1 / (10 * HOUR)) + HOUR / 2
        yield time, 0, SPOT_PRICE
        time += rng.uniform(HOUR, 6 * HOUR)


def _diurnal(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """Others use most nodes by day."""
    phase = rng.uniform(0, 24)
    for number in range(int(HOURS * 2)):
        share = 0.5 + 0.6 * math.cos((number / 2 + phase) * math.pi / 12) + rng.uniform(-0.1, 0.1)
        yield number * HOUR / 2, round(nodes * min(1.0, max(0.0, share))), SPOT_PRICE


def _bursts(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """Calm hours, and hours in which nodes come and go every few minutes."""
    time, calm = 0.0, True
    while time < HOURS * HOUR:
        end = time + rng.uniform(2 * HOUR, 8 * HOUR) * (1.0 if calm else 0.4)
        while time < end:
            yield time, nodes if calm else rng.randint(0, nodes), SPOT_PRICE
            time += end - time if calm else rng.uniform(_STEP, 3 * _STEP)
        calm = not calm


def _spikes(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """Nodes are always there, and their price rises for some hours, up to above that of on-demand nodes."""
    time = 0.0
    while time < HOURS * HOUR:
        yield time, nodes, SPOT_PRICE * rng.uniform(0.9, 1.1)
        time += rng.uniform(4 * HOUR, 16 * HOUR)
        yield time, nodes, rng.uniform(1.5, 1.1 * ON_DEMAND_PRICE)
        time += rng.uniform(HOUR / 2, 3 * HOUR)


def _shortages(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """For an hour at a time there are few nodes or none."""
    time = 0.0
    while time < HOURS * HOUR:
        yield time, nodes, SPOT_PRICE
        time += rng.uniform(2 * HOUR, 7 * HOUR)
        yield time, rng.randint(0, nodes // 2), SPOT_PRICE
        time += HOUR


def _flicker(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """There is no calm: every 10 to 40 minutes another number of nodes."""
    time = 0.0
    while time < HOURS * HOUR:
        yield time, rng.randint(0, nodes), SPOT_PRICE
        time += rng.uniform(_STEP, 4 * _STEP)


def _dry(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """Hardly a node for 6 to 14 hours at a time."""
    time = 0.0
    while time < HOURS * HOUR:
        yield time, nodes, SPOT_PRICE
        time += rng.uniform(2 * HOUR, 8 * HOUR)
        yield time, rng.choice([0, 0, 1]), SPOT_PRICE
        time += rng.uniform(6 * HOUR, 14 * HOUR)


def _scarce(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """Mostly one node."""
    time = 0.0
    while time < HOURS * HOUR:
        yield time, rng.choice([0, 1, 1, 1, 2, nodes]), SPOT_PRICE
        time += rng.expovariate(1 / (3 * HOUR))


def _peaks(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """Nodes are always there, and often cost up to twice as much as on-demand nodes, for up to four hours."""
    time = 0.0
    while time < HOURS * HOUR:
        yield time, nodes, SPOT_PRICE * rng.uniform(0.8, 1.2)
        time += rng.uniform(2 * HOUR, 8 * HOUR)
        yield time, nodes, ON_DEMAND_PRICE * rng.uniform(1.0, 2.0)
        time += rng.uniform(HOUR / 2, 4 * HOUR)


def _tides(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """The price rises and falls with the day, from half of the usual one to nearly that of on-demand nodes."""
    phase = rng.uniform(0, 24)
    for number in range(int(HOURS * 2)):
        price = 1.6 + 1.2 * math.cos((number / 2 + phase) * math.pi / 12) + rng.uniform(-0.1, 0.1)
        yield number * HOUR / 2, nodes, max(0.5, SPOT_PRICE * price)


def _storms(rng: random.Random, nodes: int) -> Iterator[tuple[float, int, float]]:
    """Bursts and spikes together."""
    time = 0.0
    while time < HOURS * HOUR:
        calm, end = rng.random() < 0.6, time + rng.uniform(HOUR, 5 * HOUR)
        while time < end:
            usual = SPOT_PRICE * rng.uniform(0.8, 1.2)
            price = usual if rng.random() < 0.7 else ON_DEMAND_PRICE * rng.uniform(0.5, 1.2)
            yield time, nodes if calm else rng.randint(0, nodes - 1), price
            time += end - time if calm else rng.uniform(_STEP, 4 * _STEP)


KINDS: dict[str, _Draw] = {
    "outages": _outages,
    "diurnal": _diurnal,
    "bursts": _bursts,
    "spikes": _spikes,
    "shortages": _shortages,
}
# None of the rules was made with these.
UNLIKE: dict[str, _Draw] = {
    "flicker": _flicker,
    "dry": _dry,
    "scarce": _scarce,
    "peaks": _peaks,
    "tides": _tides,
    "storms": _storms,
}


def synthetic_trace(kind: str, seed: int, *, nodes: int, pool: str = "spot") -> Trace:
    """Draw a trace of four days in which a job can have so many nodes of a pool at most."""
    drawn = (KINDS | UNLIKE)[kind](random.Random(f"{kind}-{seed}"), nodes)
    end = HOURS * HOUR
    offers = [Offer(time=time, nodes=number, price=price) for time, number, price in drawn if time < end]
    return Trace({pool: offers}, end)
