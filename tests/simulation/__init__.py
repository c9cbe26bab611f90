"""A small world in which a job's whole life passes in a second: nodes, pods, agents, ranks, and an operator.

Only the operator's decisions are real (`plan` and `assignment_for`). Everything else is modelled with the
delays and faults that matter to them: reports that are late, lost or repeated, notices that come directly and
through the node, nodes that go with and without notice, agents that restart, an operator that crashes between
any two writes or is away for minutes. All randomness comes from one seed.
"""

from simulation.parts import Node, spec_of
from simulation.world import World

__all__ = ["Node", "World", "spec_of"]
