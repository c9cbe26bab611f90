"""The steps of a run, driven from a loop that another framework owns.

The framework computes and updates. This library adds the order of the samples, the resume, the commits and the
drain. `spottrain.adapters` has adapters for Hugging Face's Trainer, Lightning and Accelerate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from spottrain.data.batch import FetchedBatch, MicroBatch
from spottrain.loop.acceptance import check_given
from spottrain.loop.epoch import Epoch
from spottrain.loop.training import Training
from spottrain.loop.under_way import StepsUnderWay
from spottrain.world.failures import UserError


class ForeignLoop:
    """Drives the steps of a `Training` from a loop that another framework owns.

    Take the data from `micro_batches`, pass the loss of each micro-batch through `weigh`, and call `before_update`. A
    step is complete when `complete_step` is called, or when the data of the next step is requested. The constructor
    is a collective that resumes from the newest commit.

    Example:
        >>> import spottrain, torch
        >>> from spottrain.loop.foreign_loop import ForeignLoop
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
        >>> with spottrain.session(global_batch=4, micro_batch=2) as session:
        ...     model = torch.nn.Linear(3, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     loop = ForeignLoop(session.adopt(model, optimizer, dataset=data), total=3)
        ...     number = session.batch_plan.num_micro_batches  # what a framework calls accumulation
        ...     for count, (_, (inputs, targets)) in enumerate(loop.micro_batches(), start=1):
        ...         loss = loop.weigh(torch.nn.functional.mse_loss(model(inputs), targets))
        ...         (loss / number).backward()
        ...         if count % number == 0:
        ...             loop.before_update()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> loop.step
        3
    """

    def __init__(
        self, training: Training, total: int | None = None, *, epochs: int | None = None, by_hand: bool = False
    ) -> None:
        """Resume from the newest commit.

        Args:
            training: What `Session.adopt` returned.
            total: Steps of the whole run.
            epochs: Epochs of the whole run. With `total`, it ends with what comes first.
            by_hand: Whether the framework's user computes any number of losses of a batch, and steps any optimizer.
                The steps then have one micro-batch, and are not judged.

        Raises:
            UserError: As `Training.steps`, or neither length is given.
        """
        check_given(total, epochs)
        self.training = training
        self._by_hand = by_hand
        self._fetched: deque[MicroBatch] = deque()
        self._num_weighed = 0
        self._has_begun = False  # whether the loop has fetched data of the step under way
        self._is_updated = False  # whether the step under way was updated, or is just about to be
        training.before_finish = self._leave
        self._steps = StepsUnderWay(training, total=total, epochs=epochs)

    @property
    def total(self) -> int:
        """Steps of the whole run. If an `order` gives epochs of different lengths, as far as it is known."""
        return self.training.total_steps or 0

    @property
    def step(self) -> int:
        """Steps completed since the start of the run."""
        return self.training.step

    @property
    def epoch(self) -> Epoch[Any] | None:
        """The epoch under way, of which `number` and `first_step` are for everyone, if the run has epochs."""
        return self._steps.epoch

    @property
    def fetched(self) -> tuple[MicroBatch, ...]:
        """The micro-batches whose data were fetched and whose loss was not weighed yet."""
        return tuple(self._fetched)

    def micro_batches(self) -> Iterator[FetchedBatch]:
        """This rank's micro-batches of the step under way and of all that follow.

        The loop may take all micro-batches of a step at once, but those of the next step only after the framework's
        optimizer step.

        Yields:
            The micro-batch's part of the step, and its data as `collate` made them, on the rank's device.
        """
        self.complete_step()  # if the loop over the data was left between two steps
        while (step := self._steps.step) is not None:
            for batch in step.fetch():
                self._has_begun = True
                self._fetched.append(batch.micro_batch)
                yield batch
            if self._steps.step is step:
                self.complete_step()

    def epochs(self) -> Iterator[Epoch[Any]]:
        """The epochs that are left of a run of `epochs`, each with an exact end.

        A run that is resumed inside an epoch continues there. One that is resumed after the last step of an epoch
        begins with that epoch, without steps, so that what the script does after them is done.

        Yields:
            Each epoch in turn. Loop over its micro-batches.

        Raises:
            UserError: The run has steps, or the loop over an epoch was left early, and the next one begun.
        """
        return self._steps.epochs(
            lambda: (batch for _, batch in self.micro_batches()),
            "loop.epochs() needs their number: pass epochs=... instead of total=...",
        )

    def evaluation(self) -> AbstractContextManager[None]:
        """As `Training.evaluation`: around what may take long between two steps, such as an evaluation."""
        return self.training.evaluation()

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Weigh the loss of the oldest micro-batch that is not weighed yet.

        A framework that divides the result by the number of micro-batches, and averages gradients over the ranks,
        then has the gradient of the global batch's mean.

        Args:
            loss: The mean over the samples of the micro-batch, a scalar.

        Returns:
            The weighted loss, for backward.

        Raises:
            Drained: The ranks have agreed to stop. Do not catch it: it ends the script.
            UserError: No micro-batch is left to weigh: the data are not from `micro_batches`.
        """
        plan = self.training.plan
        weighted = loss * self._oldest().loss_weight * plan.num_micro_batches
        self._observe(weighted / plan.num_micro_batches)
        return weighted

    def observe(self, loss: torch.Tensor) -> None:
        """Add a loss that is weighted already, instead of calling `weigh`.

        Args:
            loss: The micro-batch's part of the global batch's mean, times the number of ranks.
        """
        self._oldest()
        self._observe(loss)

    def before_update(self, *_: Any) -> None:
        """Call this when all gradients of the step are computed, and not used yet.

        If the job has `stability`, the gradients of a bad step are cleared here, so that the framework's update
        changes nothing. It can serve as a hook for `optimizer.register_step_pre_hook`, if the framework steps the
        optimizer without a closure.

        Raises:
            Drained: The ranks have agreed to stop. Do not catch it: it ends the script.
            UserError: Micro-batches of the step are missing. The update would depend on the number of ranks.
        """
        if self._has_begun:
            if not self._by_hand:
                self._check_weighed("the optimizer was stepped")
            self.training.begin_update()
            self._is_updated = True
        self.training.may_update()

    def complete_step(self, *, pauses: bool = False) -> None:
        """Call this after the framework's optimizer step. Commits if a commit is due; a second call does nothing.

        Args:
            pauses: Whether something else comes before the next step, such as an evaluation. The step can then be
                committed meanwhile.

        Raises:
            Drained: The ranks have agreed to stop here, and the step is committed. Do not catch it: it ends the
                script.
            UserError: Micro-batches of the step are missing.
        """
        if self._steps.step is not None and self._has_begun:
            if self._by_hand:
                self._fetched.clear()
            else:
                self._check_weighed("the next step began")
            self.training.updated_elsewhere()
            self.training.pauses = pauses
            self._has_begun, self._is_updated, self._num_weighed = False, False, 0
            self._steps.advance()

    def _leave(self) -> None:
        """Complete a step whose update was made when the script left the loop."""
        if self._is_updated:
            self.training.updated_elsewhere()

    def _oldest(self) -> MicroBatch:
        if not self._fetched:
            raise UserError(
                "a loss was computed for data that are not the job's; train with the batches that the adapter gives, "
                "and weigh the loss of each once"
            )
        return self._fetched[0] if self._by_hand else self._fetched.popleft()

    def _observe(self, share: torch.Tensor) -> None:
        assert self._steps.step is not None  # a micro-batch was fetched
        if not self._is_updated:  # by hand, one loss may follow the update of another
            self.training.begin_micro_batch(self._num_weighed)
        self._num_weighed += 1
        self._steps.step.observe(share.detach() / self.training.plan.world_size)

    def _check_weighed(self, what: str) -> None:
        number = self.training.plan.num_micro_batches
        if self._num_weighed != number:
            raise UserError(
                f"{what} when {self._num_weighed} of the {number} micro-batches of step {self.step + 1} had been "
                "weighed and gone backward; let every micro-batch do both, and step the optimizer once, after the "
                "last (the adapter sets the accumulation of gradients)"
            )
