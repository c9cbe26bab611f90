"""A run whose loop, models, optimizers and data are the script's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from spottrain.engines.model_state import full_state
from spottrain.engines.named_state import MODEL
from spottrain.loop.acceptance import checked_total
from spottrain.loop.training import Training
from spottrain.world.failures import UserError


class Run:
    """The steps of a script's own loop; `Session.attach` creates it.

    Example:
        >>> import spottrain, torch
        >>> with spottrain.session() as session:
        ...     model, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        ...     optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])
        ...     run = session.attach(total=3, model=model, other=other, optimizer=optimizer)
        ...     while run.step < run.total:
        ...         loss = (model(torch.ones(3)) - other(torch.ones(3))).square().sum()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        ...         run.boundary(loss)
        >>> run.step
        3

    Attributes:
        total: Steps of the whole run.
    """

    def __init__(
        self,
        training: Training,
        total: int,
        *,
        rank: int,
        model_state: Callable[[str], dict[str, Any]],
        optimizers: Iterable[Optimizer],
    ) -> None:
        """Resume from the newest commit. A collective. Raises UserError as `Training.steps` does.

        Args:
            training: What commits and resumes.
            total: Steps of the whole run.
            rank: Number of this rank.
            model_state: The state of the model of a name, with its shards.
            optimizers: What the script steps. The ranks may stop before the first of them in a step.
        """
        self.total = checked_total(total)
        self._training = training
        self._rank = rank
        self._model_state = model_state
        self._steps = training.steps(self.total)
        self._under_way = next(self._steps, None)
        self._is_judged = False
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._begin_update())

    @property
    def step(self) -> int:
        """Steps completed since the start of the run. It is the newest commit's after a resume."""
        return self._training.step

    @property
    def loss(self) -> float:
        """As `Training.loss`."""
        return self._training.loss

    @property
    def share(self) -> range:
        """Which samples of the step under way are this rank's, counted from the start of the run.

        The ranks share `batch.global` samples a step, in this order. A script with data of its own may follow it, so
        that its run is the same at any number of ranks.
        """
        return self._training.share

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Weigh the mean over `share` so that the average of the ranks is the mean over the global batch."""
        plan = self._training.plan
        return loss * (len(self.share) * plan.world_size / plan.global_batch)

    def may_update(self, loss: torch.Tensor | float) -> bool:
        """Judge the step under way, if the job has `stability`, before its optimizers step. A collective.

        Args:
            loss: As for `boundary`, which is then called without it.

        Returns:
            Whether to step the optimizers. If not, their gradients are cleared; call `boundary` all the same.

        Raises:
            UserError: The job is to fail.
        """
        self._observe(loss)
        self._is_judged = True
        return self._training.may_update()

    def boundary(self, loss: torch.Tensor | float | None = None) -> None:
        """End a step: call it once a step on all ranks, after the updates of everything that is attached.

        It reports the step, follows notices, and commits if a commit is due. What was done since the boundary before
        counts as one step, also if nothing was updated; what a script leaves without a boundary, as a batch that it
        abandons, is no step. A collective.

        Args:
            loss: This rank's loss, as it went backward. The mean over the ranks is reported.

        Raises:
            Drained: The ranks have agreed to stop, and this step is committed. Do not catch it: it ends the script.
            UserError: All steps of the run are done.
        """
        if self._under_way is None:
            raise UserError(f"run.boundary was called after step {self.total}, the last one; end the loop there")
        if not self._is_judged:
            self._note_update(loss)
        self._is_judged = False
        self._training.updated_elsewhere()
        self._under_way = next(self._steps, None)

    def full_state_dict(self, name: str = MODEL) -> dict[str, Any]:
        """A whole model, to write it to a file. A collective, for between two steps.

        Args:
            name: Its name in `Session.attach`.

        Returns:
            On rank 0, the state dict of the model before it was spread, in the CPU's memory. On the other ranks, {}.
        """
        return full_state(self._model_state(name), keep=self._rank == 0)

    def _begin_update(self) -> None:
        if self._under_way is not None:
            self._training.begin_update()

    def _note_update(self, loss: torch.Tensor | float | None) -> None:
        if self._training.is_judged:
            raise UserError(
                "the job has stability, and the script doesn't ask whether to update: step the optimizers only "
                "`if run.may_update(loss)`, or leave stability out of the job"
            )
        if loss is not None:
            self._observe(loss)
        self._training.may_update()

    def _observe(self, loss: torch.Tensor | float) -> None:
        if self._under_way is not None:
            share = torch.as_tensor(loss).detach() / self._training.plan.world_size
            self._under_way.observe(share.to(torch.float32))
