"""Loops of reinforcement learning as people write them, for the library and for a single process without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import spottrain
from loop_parts import TOTAL, WIDTH, plain_state, spread


class Environment:
    """A task without data: the reward is high where the action is near a function of the observation."""

    def __init__(self) -> None:
        self.number = 0

    def observe(self, size: int) -> torch.Tensor:
        return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(self.number))

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


Q_BATCH, CAPACITY = 8, 1 << 16


def q_learning(session: spottrain.Session | None, after_step: Callable[[], None]) -> Mapping[str, Any]:
    """A replay buffer in numpy arrays, a target network, and a temperature that has an optimizer of its own."""
    torch.manual_seed(7)
    online, target = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
    target.load_state_dict(online.state_dict())
    temperature = torch.zeros(1, requires_grad=True)
    replay: dict[str, Any] = {"observations": np.zeros((CAPACITY, WIDTH), np.float32), "size": 0}
    best: list[float] = []
    environment = Environment()
    network = spread(session, online) if session is not None else online
    of_network = torch.optim.Adam(network.parameters(), lr=0.05)
    of_temperature = torch.optim.Adam([temperature], lr=0.1)
    run = None
    if session is not None:
        run = session.attach(
            total=TOTAL,
            network=network,
            target=target,
            temperature=temperature,
            of_network=of_network,
            of_temperature=of_temperature,
            replay=replay,
            best=best,
            environment=environment,
        )
    for step in range(TOTAL) if run is None else iter(lambda: run.step, TOTAL):
        seen = environment.observe(Q_BATCH)
        environment.number += 1
        size = replay["size"]
        replay["observations"][size : size + Q_BATCH] = seen.numpy()
        replay["size"] = size + Q_BATCH
        positions = range(Q_BATCH) if run is None else [position % Q_BATCH for position in run.share]
        drawn = [(7 * position + step) % (size + Q_BATCH) for position in positions]
        chosen = torch.from_numpy(replay["observations"][drawn])
        with torch.no_grad():
            wanted = chosen[:, :3] + 0.9 * target(chosen)
        loss = functional.mse_loss(network(chosen), wanted)
        of_network.zero_grad()
        torch.autograd.backward(loss if run is None else run.weigh(loss))
        of_network.step()
        of_temperature.zero_grad()
        torch.autograd.backward((temperature.exp() * (2.0 + step)).sum())
        of_temperature.step()
        if step % 2:
            target.load_state_dict(online.state_dict())
        best.append(float(step))
        if run is not None:
            run.boundary(run.weigh(loss))
            after_step()
    assert best == [float(step) for step in range(TOTAL)]
    assert environment.number == TOTAL
    everything = torch.from_numpy(replay["observations"][: TOTAL * Q_BATCH].copy())
    return {**plain_state(network=network, target=target), "temperature": temperature.detach(), "replay": everything}


class Policy(nn.Module):
    """An actor and a critic over one body."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.body, self.actor, self.critic = nn.Linear(WIDTH, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.body(seen))
        return functional.log_softmax(self.actor(hidden), -1), self.critic(hidden).squeeze(-1)


EPISODES = 8


def actor_critic(session: spottrain.Session | None, after_step: Callable[[], None]) -> Mapping[str, Any]:
    """Episodes of an environment instead of data, several updates a step, and two optimizers for one model."""
    policy = Policy()
    network = spread(session, policy) if session is not None else policy
    matrices = [each for each in policy.parameters() if each.ndim == 2]
    of_matrices = torch.optim.SGD(matrices, lr=0.05, momentum=0.9, nesterov=True)
    of_others = torch.optim.AdamW([each for each in policy.parameters() if each.ndim != 2], lr=0.01)
    rewards: dict[str, float] = {"running": 10.0}
    run = None
    if session is not None:
        run = session.attach(
            total=TOTAL, policy=network, of_matrices=of_matrices, of_others=of_others, rewards=rewards
        )
    for step in range(TOTAL) if run is None else iter(lambda: run.step, TOTAL):
        draw = torch.Generator().manual_seed(step)
        seen, chosen = torch.randn(EPISODES, WIDTH, generator=draw), torch.rand(EPISODES, generator=draw)
        own = list(range(EPISODES)) if run is None else [position % EPISODES for position in run.share]
        for _ in range(2):  # epochs of PPO over the same episodes
            logs, values = network(seen[own])
            actions = (chosen[own] > 0.5).long()
            returns = seen[own, 0] * (1.0 - 2.0 * actions)
            advantage = returns - values.detach()
            loss = (-logs[range(len(own)), actions] * advantage).mean() + functional.mse_loss(values, returns)
            for each in (of_matrices, of_others):
                each.zero_grad()
            torch.autograd.backward(loss if run is None else run.weigh(loss))
            for each in (of_matrices, of_others):
                each.step()
        rewards["running"] = 0.95 * rewards["running"] + 0.05 * float(seen[:, 0].sum())
        if run is not None:
            run.boundary(run.weigh(loss))
            after_step()
    return {**plain_state(policy=network), "running": torch.tensor(rewards["running"])}
