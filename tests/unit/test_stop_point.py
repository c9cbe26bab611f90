"""Where the ranks stop: every interleaving of training threads and listeners."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from spottrain.world import listener
from spottrain.world.listener import Fitness, Listener, Rounds
from spottrain.world.stop_point import COMPLETION, UPDATE, Point, StopPoint, hurries, last_part, promise

NUM_MICRO_BATCHES = 2
PARTS = (*range(NUM_MICRO_BATCHES), UPDATE, COMPLETION)
STEPS = (1, 2)
RUN = [Point(step, part) for step in STEPS for part in PARTS]


@dataclass(frozen=True)
class Rank:
    """What a rank has done.

    Attributes:
        begun: Number of parts in RUN that it has begun.
        is_done: Whether the newest of them is done.
        kept: The step after which its state was kept last.
        promised: Its promise, once its listener has heard of the notice.
    """

    begun: int = 0
    is_done: bool = True
    kept: int | None = 0
    promised: Point | None = None

    @property
    def point(self) -> Point:
        return RUN[self.begun - 1] if self.begun else Point(0, COMPLETION)


World = tuple[Rank, ...]


def limit(world: World, rank: Rank) -> tuple[Point | None, bool]:
    """The last part that a rank may begin, and whether the ranks have agreed on it."""
    promises = [each.promised for each in world if each.promised is not None]
    agreed = len(promises) == len(world)
    return (last_part(promises), True) if agreed else (rank.promised, False)


def successors(world: World, *, keeps: bool, hurried: bool, meets: frozenset[int]) -> Iterator[World]:
    """The worlds after one more act of one rank.

    `meets` are the kinds of parts whose collectives end only once all ranks have begun the part.
    """
    for index, rank in enumerate(world):
        others = world[:index] + world[index + 1 :]

        def after(changed: Rank, others: World = others) -> World:
            return tuple(sorted((*others, changed), key=repr))  # the ranks are alike

        if rank.promised is None:
            promised = promise(rank.point, is_done=rank.is_done, kept=rank.kept, hurried=hurried)
            yield after(replace(rank, promised=promised))
        if not rank.is_done:
            everybody = all(each.begun >= rank.begun for each in world)
            if rank.point.part not in meets or everybody:
                is_change = rank.point.part >= UPDATE
                is_kept = keeps or rank.promised is not None
                kept_step = (rank.point.updated if is_kept else None) if is_change else rank.kept
                yield after(replace(rank, is_done=True, kept=kept_step))
        elif rank.begun < len(RUN):
            last, _ = limit(world, rank)
            if last is None or RUN[rank.begun] <= last:
                yield after(replace(rank, begun=rank.begun + 1, is_done=False))


def reachable(
    num_ranks: int, *, keeps: bool, hurried: bool, meets: frozenset[int]
) -> Iterator[tuple[World, list[World]]]:
    seen: set[World] = set()
    left: list[World] = [(Rank(),) * num_ranks]
    while left:
        world = left.pop()
        if world not in seen:
            seen.add(world)
            following = list(successors(world, keeps=keeps, hurried=hurried, meets=meets))
            yield world, following
            left.extend(following)


# Of which parts the collectives end only once all ranks have begun them.
MEETINGS = {
    "ddp": frozenset({NUM_MICRO_BATCHES - 1, UPDATE, COMPLETION}),
    "fsdp": frozenset(PARTS),
    "nothing": frozenset[int](),
}


@pytest.mark.parametrize("hurried", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("meets", MEETINGS.values(), ids=MEETINGS.keys())
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_ranks_stop_in_the_same_step_and_none_waits_for_another(
    num_ranks: int, meets: frozenset[int], keeps: bool, hurried: bool
) -> None:
    check_every_world(num_ranks, meets, keeps=keeps, hurried=hurried)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_so_do_three_ranks(name: str) -> None:
    check_every_world(3, MEETINGS[name], keeps=True, hurried=True)


def check_every_world(num_ranks: int, meets: frozenset[int], *, keeps: bool, hurried: bool) -> None:
    ends = 0
    for world, following in reachable(num_ranks, keeps=keeps, hurried=hurried, meets=meets):
        promises = [each.promised for each in world if each.promised is not None]
        is_agreed = len(promises) == num_ranks
        assert not is_agreed or all(each.point <= last_part(promises) for each in world)
        if following:
            continue
        ends += 1
        assert is_agreed
        assert all(each.is_done for each in world)
        if (last := last_part(promises)) < RUN[-1]:
            # A rank that rests after an update still has the state.
            assert {each.kept for each in world if each.point.part != UPDATE} <= {last.updated}
            assert {each.point.updated for each in world} == {last.updated}
    assert ends > 1


def test_a_step_is_abandoned_if_time_is_short_and_the_state_before_is_kept() -> None:
    assert promise(Point(3, 1), is_done=True, kept=2, hurried=True) == (3, 1)
    assert promise(Point(3, 1), is_done=True, kept=2, hurried=False) == (3, UPDATE)
    assert promise(Point(3, 1), is_done=True, kept=None, hurried=True) == (3, UPDATE)


def test_nothing_new_begins_after_an_update_or_a_completion() -> None:
    assert promise(Point(3, UPDATE), is_done=False, kept=2, hurried=True) == (3, UPDATE)
    assert promise(Point(3, UPDATE), is_done=True, kept=None, hurried=True) == (3, UPDATE)
    assert promise(Point(3, COMPLETION), is_done=False, kept=None, hurried=False) == (3, COMPLETION)
    assert promise(Point(3, COMPLETION), is_done=True, kept=3, hurried=False) == (3, COMPLETION)
    assert promise(Point(3, COMPLETION), is_done=True, kept=None, hurried=False) == (4, UPDATE)


def test_parts_are_in_the_order_of_the_run() -> None:
    assert sorted(RUN) == RUN
    assert all(first < second for first, second in itertools.pairwise(RUN))


@pytest.mark.parametrize(
    ("seconds_left", "step_seconds", "is_hurried"),
    [(15.0, 8.0, True), (30.0, 8.0, False), (120.0, 8.0, False), (120.0, 70.0, True), (15.0, 0.1, False)],
    ids=["GKE", "Azure", "EC2", "EC2, steps of a minute", "short steps"],
)
def test_a_notice_hurries_if_the_step_does_not_fit(
    seconds_left: float, step_seconds: float, is_hurried: bool
) -> None:
    assert hurries(seconds_left, commit_seconds=4.0, to_go_seconds=step_seconds) == is_hurried


class State:
    """What a rank keeps: a step."""

    def __init__(self, step: int) -> None:
        self.step = step


class SharedRounds:
    """Rounds of ranks that are threads of this process. Implements Rounds."""

    def __init__(self, num_ranks: int) -> None:
        self.asked = threading.Event()
        self.values: dict[str, dict[int, Any]] = defaultdict(dict)
        self.changed = threading.Condition()
        self.num_ranks = num_ranks

    def of(self, rank: int) -> Rounds:
        return RankRounds(self, rank)


@dataclass(frozen=True)
class RankRounds:
    shared: SharedRounds
    rank: int

    def ask(self) -> None:
        self.shared.asked.set()

    def is_asked(self) -> bool:
        return self.shared.asked.is_set()

    def gather(self, name: str, value: Any) -> list[Any]:
        shared = self.shared
        with shared.changed:
            values = shared.values[name]
            values[self.rank] = value
            shared.changed.notify_all()
            shared.changed.wait_for(lambda: len(values) == shared.num_ranks)
            return [values[rank] for rank in range(shared.num_ranks)]


@dataclass
class Commits:
    """Notes what the listener of a rank commits. Implements Committer.

    Attributes:
        left: Seconds until the deadline.
        has_changed: Whether the weights have changed meanwhile.
        errors: How many tries fail.
    """

    left: float
    has_changed: bool = False
    errors: int = 0
    committed: list[tuple[int, bool]] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)

    def seconds_left(self) -> float:
        return self.left

    def seconds_to_go(self) -> float:
        return 60.0

    def seconds_needed(self, seconds_left: float) -> float:
        return seconds_left if seconds_left < 60.0 else 0.0

    def fitness(self, kept: State, *, is_resting: bool) -> Fitness:
        if not self.has_changed:
            return Fitness.NOW
        return Fitness.NEVER if is_resting else Fitness.LATER

    def commit(self, kept: State, seconds_left: float, *, is_resting: bool) -> bool:
        self.errors -= 1
        if self.errors < 0:
            self.committed.append((kept.step, is_resting))
        return self.errors < 0

    def give_up(self, step: int) -> None:
        self.given_up.append(step)


Script = Callable[[int, Point], None]


def train(rank: int, point: StopPoint[State], meet: Callable[[], object], script: Script) -> Point:
    """A training thread. The ranks meet at the end of each step's last micro-batch. Returns the last part begun."""
    for part in (Point(step, part) for step in itertools.count(1) for part in PARTS):
        if not point.may_begin(part):
            point.rest(State(part.step) if part.part == COMPLETION else None)
            return point.begun
        script(rank, part)
        if part.part == NUM_MICRO_BATCHES - 1:
            meet()
        if part.part >= UPDATE:
            assert point.done(State(part.step))
    raise AssertionError("the ranks did not stop")


def run_threads(num_ranks: int, commits: list[Commits], script: Script, due: threading.Event) -> list[Point]:
    rounds, barrier = SharedRounds(num_ranks), threading.Barrier(num_ranks)
    points: list[StopPoint[State]] = [StopPoint(State(0)) for _ in range(num_ranks)]
    for rank, point in enumerate(points):
        is_due = due.is_set if rank == num_ranks - 1 else lambda: False
        Listener(point, rounds.of(rank), is_due=is_due, committer=commits[rank])
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank: train(rank, points[rank], barrier.wait, script), range(num_ranks)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LISTEN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(listener, "LISTEN_EVERY_SECONDS", 0.001)
    monkeypatch.setattr(listener, "TRY_EVERY_SECONDS", 0.001)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("at", [Point(3, 0), Point(3, 1), Point(3, UPDATE), Point(3, COMPLETION)])
def test_the_listeners_commit_the_newest_step_of_all_ranks(at: Point) -> None:
    commits, due, stopped = [Commits(100.0) for _ in range(3)], threading.Event(), threading.Event()

    def script(rank: int, part: Point) -> None:
        if rank == 2 and part == at:
            due.set()
            stopped.wait(0.05)

    ends = run_threads(3, commits, script, due)
    (step,) = {each.updated for each in ends}
    assert [each.committed for each in commits] == [[(step, True)]] * 3
    assert step >= at.updated


@pytest.mark.usefixtures("quick")
def test_they_commit_beside_a_thread_that_does_not_rest_in_time() -> None:
    commits, due, is_committed = [Commits(30.0) for _ in range(2)], threading.Event(), threading.Event()

    def commit(kept: State, seconds_left: float, *, is_resting: bool) -> bool:
        commits[1].committed.append((kept.step, is_resting))
        is_committed.set()
        return True

    commits[1].commit = commit  # type: ignore[method-assign]

    def script(rank: int, part: Point) -> None:
        if rank == 1 and part == (2, 1):  # a micro-batch that takes until the commit is there
            due.set()
            assert is_committed.wait(60.0)

    run_threads(2, commits, script, due)
    assert commits[1].committed == [(1, False)]
    assert [step for step, _ in commits[0].committed] == [1]


@pytest.mark.usefixtures("quick")
def test_weights_that_have_changed_are_not_committed() -> None:
    commits, due = [Commits(100.0, has_changed=True), Commits(100.0)], threading.Event()
    due.set()
    run_threads(2, commits, lambda rank, part: None, due)
    assert [each.committed for each in commits] == [[], []]
    assert commits[0].given_up == commits[1].given_up != []


@pytest.mark.usefixtures("quick")
def test_a_commit_that_fails_is_tried_again() -> None:
    commits, due = [Commits(100.0, errors=2) for _ in range(2)], threading.Event()
    due.set()
    run_threads(2, commits, lambda rank, part: None, due)
    assert all(len(each.committed) == 1 for each in commits)
