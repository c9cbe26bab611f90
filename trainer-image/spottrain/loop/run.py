"""A run whose loop, models and optimizers are the script's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from spottrain.engines.model_state import full_state
from spottrain.engines.named_state import MODEL
from spottrain.loop.epoch import Epoch
from spottrain.loop.step import Step
from spottrain.loop.training import Training
from spottrain.loop.under_way import StepsUnderWay
from spottrain.loop.whole_batch import gather
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
    """

    def __init__(
        self,
        training: Training,
        *,
        total: int | None,
        epochs: int | None,
        has_data: bool,
        rank: int,
        model_state: Callable[[str], dict[str, Any]],
        optimizers: Iterable[Optimizer],
    ) -> None:
        """Resume from the newest commit. A collective. Raises UserError as `Training.steps` does.

        Args:
            training: What commits and resumes.
            total: Steps of the whole run; None if it ends with its last epoch.
            epochs: Epochs of the whole run; None if it has steps alone.
            has_data: Whether the library reads the data.
            rank: Number of this rank.
            model_state: The state of the model of a name, with its shards.
            optimizers: What the script steps. The ranks may stop before the first of them in a step.
        """
        self._training = training
        self._has_data = has_data
        self._rank = rank
        self._model_state = model_state
        self._is_judged = False
        self._fetched: Step | None = None  # the step whose batch was fetched last
        self._steps = StepsUnderWay(training, total=total, epochs=epochs)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._begin_update())

    @property
    def total(self) -> int:
        """Steps of the whole run. If an `order` gives epochs of different lengths, as far as it is known."""
        return self._training.total_steps or 0

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

    def weigh(self, loss: torch.Tensor, count: torch.Tensor | int | None = None) -> torch.Tensor:
        """Weigh the mean over `share` so that the average of the ranks is the mean over the batch of the step.

        Args:
            loss: A mean of this rank's, to go backward.
            count: Over how many it is the mean, if that is not its samples, such as the tokens that are not ignored.
                A collective, if it is given.
        """
        if count is None:
            return loss * (self._training.part_of_batch * self._training.plan.world_size)
        own = torch.as_tensor(count, dtype=torch.float32, device=loss.device) * bool(self.share)
        every = own.clone()
        dist.all_reduce(every)
        weight = own * self._training.plan.world_size / every.clamp(min=1)
        return torch.where(weight > 0, loss * weight, 0.0)  # a mean over nothing is NaN

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather a tensor over the whole batch of the step, for a loss that compares its samples with each other.

        The rows come back in the order of the batch, at any number of ranks, with gradients for this rank's. A loss
        of gathered tensors is the mean over the batch, and the same on all ranks: it goes backward without `weigh`.
        A collective, as is the backward pass.

        Args:
            rows: A tensor with a row for each sample of `share`.

        Returns:
            A tensor with a row for each sample of the batch.

        Raises:
            UserError: `rows` has another number of rows.
        """
        shares = self._training.shares
        own = shares[self._rank]
        if rows.shape[:1] not in {(own,), (max(own, 1),)}:  # a rank without a share has another one's sample
            raise UserError(
                f"run.gather got a tensor of shape {list(rows.shape)}, and this rank has {own} samples of the step's "
                f"{sum(shares)}; pass one with a row for each of them"
            )
        return gather(rows, shares, self._rank)

    def batches(self) -> Iterator[Any]:
        """This rank's part of the batch of each step that is left, if `Session.attach` was given a data set.

        Call `boundary` once for each. A batch that the script gives up, before the boundary, is a step without an
        update.

        Yields:
            What `collate` made of all samples of `share`, on the rank's device. A rank without a share gets a sample
            of another one, to which `weigh` gives no weight.

        Raises:
            UserError: The run has epochs, or no data set.
        """
        if self._steps.is_by_epoch or not self._has_data:
            raise UserError(
                "run.batches() gives the steps of a data set: call session.attach(total=..., dataset=...). Runs of "
                "epochs have run.epochs(), and a script with data of its own loops `while run.step < run.total`"
            )
        return self._left()

    def epochs(self) -> Iterator[Epoch[Any]]:
        """The epochs that are left of a run that was attached with `epochs`, each with an exact end.

        A run that is resumed inside an epoch continues there. One that is resumed after the last step of an epoch
        begins with that epoch, without steps, so that what the script does after them is done.

        Yields:
            Each epoch in turn. Loop over its batches, as those of `batches`; without a data set, over the numbers of
            its steps, from 0.

        Raises:
            UserError: The run has steps, or the loop over an epoch was left early, and the next one begun.
        """
        advice = "run.epochs() needs their number: call session.attach(epochs=...) instead of total=..."
        return self._steps.epochs(self._left, advice)

    def evaluation(self) -> AbstractContextManager[None]:
        """As `Training.evaluation`: around what may take long between two steps, such as an evaluation."""
        return self._training.evaluation()

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
        counts as one step, also if nothing was updated; what a script with data of its own leaves without a boundary,
        as a batch that it gives up, is no step. A collective.

        Args:
            loss: This rank's loss, as it went backward. The mean over the ranks is reported.

        Raises:
            Drained: The ranks have agreed to stop, and this step is committed. Do not catch it: it ends the script.
            UserError: All steps of the run or of an epoch are done, or the batch of the step was not fetched.
        """
        if self._under_way is None:
            after = f"step {self.step}, the last one" + (" of its epoch" if self._steps.epoch is not None else "")
            raise UserError(f"run.boundary was called after {after}; call it once in each step of the loop")
        if self._has_data and self._fetched is not self._under_way:
            raise UserError(
                f"run.boundary was called in step {self.step + 1} before its batch was fetched; call it once for "
                "each batch of run.batches() or of an epoch"
            )
        if not self._is_judged:
            self._note_update(loss)
        self._cross()

    def full_state_dict(self, name: str = MODEL) -> dict[str, Any]:
        """A whole model, to write it to a file. A collective, for between two steps.

        Args:
            name: Its name in `Session.attach`.

        Returns:
            On rank 0, the state dict of the model before it was spread, in the CPU's memory. On the other ranks, {}.
        """
        return full_state(self._model_state(name), keep=self._rank == 0)

    @property
    def _under_way(self) -> Step | None:
        return self._steps.step

    def _left(self) -> Iterator[Any]:
        """What is left of the epoch, or of a run of steps."""
        while (step := self._under_way) is not None:
            if self._fetched is step:  # and given up
                self._cross()
                continue
            self._fetched = step
            yield self._content(step)

    def _content(self, step: Step) -> Any:
        if self._has_data:
            [batch] = step.fetch()
            return batch.data
        assert self._steps.epoch is not None
        return step.number - 1 - self._steps.epoch.first_step

    def _cross(self) -> None:
        self._is_judged = False
        self._training.updated_elsewhere()
        self._steps.advance()

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
            self._under_way.observe(_without_graph(loss) / self._training.plan.world_size)


def _without_graph(loss: torch.Tensor | float) -> torch.Tensor | float:
    """A loss for the meter, without a wait for an accelerator."""
    if not isinstance(loss, torch.Tensor):
        return float(loss)
    own = loss.detach()
    return own.float() if own.is_cuda else own.item()
