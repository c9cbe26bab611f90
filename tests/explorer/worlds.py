"""The small worlds: one job on three spot nodes, and what may happen to it."""

from __future__ import annotations

from explorer import agents
from explorer.operating import JOB, of_status
from explorer.world import Budget, Node, Operator, Pod, World

QUICK = {
    "undisturbed": Budget(delays=2),
    "late messages": Budget(late=1, delays=0),
    "store fault": Budget(store_faults=1, delays=0),
}
ONE_FAULT = {
    "crash": Budget(crashes=1, delays=0),
    "slow store fault": Budget(store_faults=1, delays=1),
    "loss": Budget(losses=1, delays=0),
    "notice": Budget(notices=1, delays=0),
    "short notice": Budget(short_notices=1, delays=0),
    "notice taken back": Budget(notices=1, cancels=1, delays=0),
    "cut": Budget(cuts=1, nodes=1, delays=0),
    "hint": Budget(hints=2, delays=0),
    "frozen writer": Budget(frozen=1, delays=0),
    "slow notice": Budget(notices=1, delays=1),
    "slow loss": Budget(losses=1, delays=1),
}
TWO_FAULTS = {
    "notice and crash": Budget(notices=1, crashes=1, delays=0),
    "notice and late messages": Budget(notices=1, late=1, delays=0),
    "notice and store fault": Budget(notices=1, store_faults=1, delays=0),
    "notice and loss": Budget(notices=1, losses=1, delays=0),
    "hint and notice": Budget(hints=1, notices=1, delays=0),
    "hint and loss": Budget(hints=1, losses=1, delays=0),
    "hint and crash": Budget(hints=1, crashes=1, delays=0),
    "two notices": Budget(notices=2, delays=0),
    "loss and crash": Budget(losses=1, crashes=1, delays=0),
    "loss and late messages": Budget(losses=1, late=1, delays=0),
    "loss and store fault": Budget(losses=1, store_faults=1, delays=0),
    "cut and store fault": Budget(cuts=1, nodes=1, store_faults=1, delays=0),
    "crash and late messages": Budget(crashes=1, late=1, delays=0),
}
ALL_ORDERS = {
    "undisturbed, in all orders": Budget(),
    "late messages, in all orders": Budget(late=1),
    "store fault, in all orders": Budget(store_faults=1),
    "crash, in all orders": Budget(crashes=1),
    "loss, in all orders": Budget(losses=1),
    "everything": Budget(notices=2, losses=1, crashes=1, store_faults=1, late=1, delays=1),
}
WORLDS = QUICK | ONE_FAULT | TWO_FAULTS | ALL_ORDERS


def world_of(budget: Budget) -> World:
    """Three pods are up, warm and heard; no generation has run yet.

    A fourth node is free if the cloud gives hints.
    """
    pods = tuple(Pod(number, -60, f"n{number}", -60, agent=agents.NEW) for number in (1, 2, 3))
    world = World(
        time=0,
        idle=0,
        nodes=tuple(Node(f"n{number}") for number in range(1, 5 if budget.hints else 4)),
        pods=pods,
        job=of_status(JOB.status),
        operator=Operator(),
        runs=(),
        store=(),
        budget=budget,
        prewarms=budget.hints > 0,
    )
    for pod in pods:
        world = agents.delivered(world, pod.sequence, agents.newest_report(world, pod, agents.NEW))
    return world
