"""A state of the small world.

It is a value that can be compared, hashed and replaced in parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from explorer.ranks import Reported
from explorer.replay import Position
from explorer.store import Committed, Objects, Task
from spottrain_agent.agent_state import AgentState


class Keyed:
    """A value of the real code, compared by what of it can matter."""

    __slots__ = ("_hash", "key", "value")

    def __init__(self, key: tuple[Any, ...], value: Any) -> None:
        self.key, self.value, self._hash = key, value, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self._hash == other._hash and self.key == other.key

    def __repr__(self) -> str:
        return f"{self.key}"


class Node(NamedTuple):
    """A spot node.

    - deadline: of the notice, when the node goes. None: no notice.
    - announced: when the notice was given.
    - hinted: the cloud recommends to leave the node.
    - died: when the machine went.
    - cut: the machine runs, but reaches only the store.
    """

    name: str
    deadline: int | None = None
    announced: int = 0
    cancelled: bool = False
    shown: bool = False
    died: int | None = None
    cut: bool = False
    hinted: bool = False

    @property
    def alive(self) -> bool:
        return self.died is None

    @property
    def reachable(self) -> bool:
        return self.died is None and not self.cut


class Agent(NamedTuple):
    """An agent: the real state, and what of its surroundings is under way.

    - assignment: the key of the newest one that it has received.
    - held: an assignment that is on its way, late, and since when.
    - killing: its ranks get SIGKILL.
    """

    state: Keyed
    assignment: tuple[Any, ...] | None = None
    held: tuple[Keyed, int] | None = None
    killing: bool = False

    @property
    def real(self) -> AgentState:
        state: AgentState = self.state.value
        return state


class Pod(NamedTuple):
    sequence: int
    created: int
    node: str | None = None
    placed: int | None = None
    deleted_by: int | None = None  # the end of its grace period
    ended: int | None = None  # exit code
    protected: bool = False
    agent: Agent | None = None

    @property
    def uid(self) -> str:
        return f"u{self.sequence}"

    @property
    def name(self) -> str:
        return f"job-{self.sequence}"


class RankAt(NamedTuple):
    """One rank of a run: its log, where it stands, and its files.

    - drain: the deadline in drain.json.
    - outcome: "drained" or "succeeded" with the commit, or "lost" or "fenced".
    """

    sequence: int  # of its pod
    launched: bool = False
    alive: bool = False
    log: tuple[Any, ...] = ()
    at: Position | None = None
    reported: Reported = Reported()
    drain: int | None = None
    drain_seen: int | None = None
    outcome: str | None = None


class Saving(NamedTuple):
    """The newest save of a run: a task of each rank; None once its process is gone.

    `is_known`: the ranks know how it ended.
    """

    number: int
    step: int
    tasks: tuple[Task | None, ...]
    is_background: bool
    is_known: bool


class Run(NamedTuple):
    """The processes of one generation.

    - due: when the step, or the pause before a retry, is over.
    - frozen: rank 0 uses the store at any time, and not at once.
    """

    generation: int
    resume: Committed | None
    ranks: tuple[RankAt, ...]
    fence: Task | None = None
    start: Committed | None = None
    joined: bool = False
    due: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    saving: Saving | None = None
    clean_up: Task | None = None
    frozen: bool = False


class Operator(NamedTuple):
    """The operator: what it knows besides what the API server has.

    - reports: pod's sequence, the report, and when it arrived.
    - published: whether a pass has published assignments since its start.
    - pending: actions of the newest pass.
    """

    up: bool = True
    since: int = -60
    reports: tuple[tuple[int, Keyed, int], ...] = ()
    published: bool = False
    pending: tuple[tuple[Any, ...], ...] = ()


class Budget(NamedTuple):
    """How often the world may yet do each of these to the job.

    `delays`: how often a process may be slow, as processes act in a fixed order. None: they act in all orders.
    """

    notices: int = 0
    short_notices: int = 0
    cancels: int = 0
    losses: int = 0
    cuts: int = 0
    frozen: int = 0
    crashes: int = 0
    store_faults: int = 0
    late: int = 0
    nodes: int = 0
    hints: int = 0
    delays: int | None = None


class World(NamedTuple):
    """Everything.

    - idle: how often the clock has moved since anything else did.
    - prewarms: a pod is created ahead of time, while the cloud recommends to leave a member's node.
    - late_report: a report of a pod that is on its way for long, or repeated, and since when.
    - trained: the newest generation that made a step, and its newest step.
    - acknowledged: the newest commit that a rank has reported or the protocol has returned.
    - excuse: a step may be lost now: a node went without notice, or with too little, or the store failed.
    - delayed: the processes that are slow at this moment: they act when nobody else has anything to do.
    - problem: what is wrong.
    """

    time: int
    idle: int
    nodes: tuple[Node, ...]
    pods: tuple[Pod, ...]
    job: Keyed
    operator: Operator
    runs: tuple[Run, ...]
    store: Objects
    budget: Budget
    prewarms: bool = False
    late_report: tuple[int, Keyed, int] | None = None
    trained: tuple[int, int] = (0, 0)
    acknowledged: Committed | None = None
    excuse: bool = False
    delayed: tuple[str, ...] = ()
    problem: str | None = None

    def node(self, name: str | None) -> Node | None:
        return next((node for node in self.nodes if node.name == name), None)

    def pod(self, sequence: int) -> Pod | None:
        return next((pod for pod in self.pods if pod.sequence == sequence), None)

    def with_pod(self, pod: Pod) -> World:
        return self._replace(pods=tuple(pod if p.sequence == pod.sequence else p for p in self.pods))

    def with_node(self, node: Node) -> World:
        return self._replace(nodes=tuple(node if n.name == node.name else n for n in self.nodes))

    def run(self, generation: int) -> Run | None:
        return next((run for run in self.runs if run.generation == generation), None)

    def with_run(self, run: Run) -> World:
        return self._replace(runs=tuple(run if r.generation == run.generation else r for r in self.runs))

    def spend(self, **what: int) -> World:
        left = {name: getattr(self.budget, name) - count for name, count in what.items()}
        return self._replace(budget=self.budget._replace(**left))
