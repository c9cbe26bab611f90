"""The step loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spottrain.data import random_state
from spottrain.data.loader import MicroBatches
from spottrain.data.own_data import NoBatches, OwnData
from spottrain.data.rank_data import RankData
from spottrain.engines.engine import Engine
from spottrain.engines.model_state import full_state
from spottrain.engines.named_state import OPTIMIZER
from spottrain.loop.acceptance import checked_total
from spottrain.loop.boundary import Boundary
from spottrain.loop.epoch import Epoch
from spottrain.loop.judge import Judge
from spottrain.loop.stability import StabilityGuard
from spottrain.loop.start import agree, read_from, resume
from spottrain.loop.step import LossMeter, Step
from spottrain.loop.stopping import Stopping
from spottrain.recovery.recovery import Recovery
from spottrain.recovery.training_state import TrainingState
from spottrain.world.failures import UserError
from spottrain.world.rank_context import RankContext

LEFT_EPOCH = (
    "The loop over epoch {} was left after {} of its {} steps, and the next epoch begun. Go through all steps of an "
    "epoch, or leave the loop over the epochs, too, to end the run."
)
SECOND_LOOP = (
    "training.{} is a second loop, and would begin again where this generation began. It is the loop of the "
    "whole run: do what follows an epoch inside it, in a loop over training.epochs."
)


class Training:
    """A model in training; `Session.prepare` creates it.

    Attributes:
        model: The model, spread over the ranks: call it in forward.
        step: Steps completed since the start of the run: after `Step.update`, this step is one of them. 0 until the
            loop starts, which loads the commit.
        plan: How the ranks share each step's batch.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        engine: Engine,
        state: TrainingState,
        data: RankData | OwnData,
        context: RankContext,
        recovery: Recovery,
        guard: StabilityGuard | None,
        stopping: Callable[..., Stopping] = Stopping,
    ) -> None:
        """`stopping` makes what stops the rank while a step is under way."""
        self.model = model
        self.step = 0
        self.plan = data.plan
        self._state = state
        self._engine = engine
        self._data = data
        self._context = context
        self._agreement = context.agreement
        self._reporter = context.reporter
        self._recovery = recovery
        self._saver = recovery.saver
        self._restorer = recovery.restorer
        self._checkpoint_reports = recovery.reports
        self._meter = LossMeter()
        self._judge: Judge | None = None
        if guard is not None:
            self._judge = Judge(guard, engine=engine, meter=self._meter, context=context, restorer=recovery.restorer)
        self._batches: MicroBatches | NoBatches | None = None
        self._boundary: Boundary | None = None
        self._has_updated = False
        self._recorded = 0  # the newest step whose samples are recorded
        self._make_stopping = stopping
        self._started: Stopping | None = None
        self._under_way: tuple[Step, float] | None = None  # with the time of its start
        self.before_finish: Callable[[], None] = lambda: None
        """Set by a framework's loop, which the script may have left after an update."""
        self.pauses = False
        """Set by a framework's loop: whether something else comes before the next step, such as an evaluation."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, to read its `param_groups`, such as learning rates; `Step.update` steps it."""
        return self._state.optimizers[OPTIMIZER]

    @property
    def share(self) -> range:
        """The positions that this rank computes in the step that follows."""
        return self.plan.share(self._context.rank, self._data.batches.at(self.step).positions)

    @property
    def part_of_batch(self) -> float:
        """Which part `share` is of the batch of the step that follows."""
        return len(self.share) / len(self._data.batches.at(self.step).positions)

    @property
    def shares(self) -> list[int]:
        """Samples of each rank in the batch of the step that follows."""
        batch = self._data.batches.at(self.step).positions
        return [len(self.plan.share(rank, batch)) for rank in range(self.plan.world_size)]

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if its epochs stay as long as the one under way. None before the loop starts."""
        return self._data.batches.expected_steps(self.step)

    @property
    def is_judged(self) -> bool:
        """Whether the job has `stability`, by which each step is judged before its update."""
        return self._judge is not None

    @property
    def loss(self) -> float:
        """Mean loss over the newest global batch that all ranks have reported.

        In step N, before or after its update, it is that of step N-2; on a GPU, of step N-3. NaN in the first steps
        of a generation, until it is known. It costs nothing; `step_loss` is exact.
        """
        loss = self._reporter.progress.loss
        return math.nan if loss is None else loss

    def step_loss(self) -> float:
        """Mean loss over the global batch of the step under way.

        Call it in the loop after the last `Step.backward` of the step, before or after `Step.update`. At any world
        size it is the mean over the same samples: only rounding differs. A collective that waits for all ranks, and
        for the accelerator: call it on all ranks alike, every so many steps.
        """
        [loss] = self._agreement.total([self._meter.value()])
        return loss

    def steps(self, total: int) -> Iterator[Step]:
        """The remaining steps of the run.

        Resumes from the newest commit when the loop starts: before it, model and `stateful` are as the script made
        them. Commits at the job's interval, and commits the last step. When the ranks have agreed to drain, it
        commits and ends the script as sys.exit does: code after the loop runs only when all steps are done.

        Args:
            total: Steps of the whole run, not of this generation.

        Yields:
            Each step in turn: run its micro-batches, then update.

        Raises:
            Drained: The ranks have agreed to stop. Do not catch it: it ends the script with exit code 0.
            UserError: The newest commit does not fit the model or the data, training is unstable, this is a second
                loop, `total` is not a whole number, or it or the length of the data set is not the same on all ranks.
        """
        total = checked_total(total)
        with closing(self._begin(total, by_epoch=False)):
            yield from self._steps_to(total)

    def epochs(self, number: int, *, total: int | None = None) -> Iterator[Epoch[Step]]:
        """The remaining epochs of the run, each with an exact end.

        As `steps`, and the last batch of an epoch is what is left of it. A run that is resumed inside an epoch
        continues there. One that is resumed after the last step of an epoch begins with that epoch, which then has no
        steps left, so that what the script does after them is done.

        Args:
            number: Epochs of the whole run, not of this generation.
            total: Steps of the whole run, if it may end before its last epoch does. Its last epoch then has fewer
                steps.

        Yields:
            Each epoch in turn: loop over its steps.

        Raises:
            Drained: As for `steps`.
            UserError: As for `steps`, or the loop over an epoch was left early, and the next one begun.
        """
        number = checked_total(number, "number of epochs")
        last_step = None if total is None else checked_total(total)
        with closing(self._begin(number, by_epoch=True, last_step=last_step)):
            for steps, epoch in self._data.batches.epochs_from(self.step):
                self._reporter.update(total_steps=self._data.batches.expected_steps(self.step))
                left = self._steps_to(steps.stop)
                yield Epoch(epoch.number, steps, left)
                if self.step < steps.stop:
                    raise UserError(LEFT_EPOCH.format(epoch.number, self.step - steps.start, len(steps)))
                next(left, None)  # completes the last step, if the script left the loop after its update
            self.finish()

    def finish(self) -> None:
        """Commit the newest step, unless it is committed already.

        For scripts that leave the loop early. A collective.
        """
        self.before_finish()
        if self._under_way is not None and self._under_way[0].updated:  # the script left the loop after it
            self._complete()
        if self._started is not None:
            self._started.stand_down()
        if self._boundary is not None:
            self._boundary.end(self.step)
        self._saver.save_last(self._state, self.step)
        self._reporter.update(step=self.step)

    def update_average(self, average: nn.Module, source: nn.Module, *, decay: float) -> None:
        """Let one part of the model follow another one: an exponential moving average of its weights, or a teacher.

        Call it on all ranks, after `Step.update`. The result is the same under every strategy and at any number of
        ranks, and commits hold it.

        Args:
            average: A module in the model, made by `copy.deepcopy(source).requires_grad_(False)`. Its weights become
                `decay * average + (1 - decay) * source`; its buffers are copied.
            source: A module in the model that is trained.
            decay: From 0 to 1. It may be another one in each step.

        Raises:
            UserError: The two are no such parts of the model, or DeepSpeed holds the average in bf16 or fp16.
        """
        if not 0.0 <= decay <= 1.0:
            raise UserError(f"the decay of an average is from 0 to 1, such as 0.999, and not {decay:g}")
        self._engine.update_average(average, source, decay)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation, or anything else between two steps that may take long.

        After a notice, the ranks commit the step before meanwhile. Steps that take a few seconds or more can be
        committed so without it, too. Evaluate at the start of a step, before its micro-batches: a resume then does it
        again. What runs inside changes nothing that commits hold, except for random numbers, which are as before
        afterwards.

        Example:
            >>> import spottrain, torch
            >>> data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
            >>> def evaluate(model):
            ...     with torch.no_grad():
            ...         return model(data[:][0]).mean()
            >>> with spottrain.session(global_batch=4) as session:
            ...     training = session.prepare(
            ...         torch.nn.Linear(3, 1),
            ...         optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            ...         dataset=data,
            ...     )
            ...     for step in training.steps(total=4):
            ...         if step.number % 2 == 1:
            ...             with training.evaluation():
            ...                 mean = evaluate(training.model)
            ...         for inputs, targets in step.micro_batches():
            ...             step.backward(torch.nn.functional.mse_loss(training.model(inputs), targets))
            ...         step.update()
        """
        before = random_state.capture()
        self._share_update()
        if self._started is not None:
            self._started.pause()
        try:
            yield
        finally:
            random_state.restore(before)
            if self._started is not None:
                self._started.resume()

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model under any strategy, to write it to a file.

        A collective, for between two steps. Names and values are those of an export of a commit (`spottrain
        checkpoints export`). They fit the model that the script has built, before `Session.prepare`.

        Returns:
            On rank 0, the state dict in the CPU's memory. On the other ranks, {}.
        """
        return full_state(self._engine.model_state(), keep=self._context.rank == 0)

    def begin_micro_batch(self, index: int) -> None:
        """Begin a micro-batch of the step under way, by its number. Raises Drained if the ranks stop before it."""
        assert self._under_way is not None
        self._stopping.begin_micro_batch(self._under_way[0].number, index)

    def begin_update(self) -> None:
        """Begin the update of the step under way. Raises Drained if the ranks stop before it."""
        assert self._under_way is not None
        self._stopping.begin_update(self._under_way[0].number)

    def may_update(self) -> bool:
        """Judge the step under way: whether its gradients are used.

        The answer is the same on all ranks. If they are not used, the gradients are cleared and, if the job says so,
        training rolls back to the newest commit. A collective.

        Raises:
            UserError: The job is to fail.
        """
        if self._judge is None or self._under_way is None or self._judge.accepts(self._state, self.step + 1):
            self._has_updated = True
            return True
        return False

    def updated_elsewhere(self) -> None:
        """Note that the framework that owns the loop has updated the step under way. A collective."""
        self.begin_update()  # a scaler may have left out the optimizer's step
        assert self._under_way is not None
        step, _ = self._under_way
        self._engine.update()
        step.updated = True
        self._stopping.updated(step.number)

    def _share_update(self) -> None:
        """Share what the ranks have in common after an update that was made elsewhere, as buffers, for a commit."""
        step = self._under_way[0] if self._under_way is not None else None
        if step is not None and not step.updated and self._stopping.is_updating(step.number):
            self.updated_elsewhere()

    def clean_up(self) -> None:
        """At the end of the script: delete the checkpoints that are no longer kept."""
        total = self._state.total_steps
        if self._context.rank == 0 and total is not None and self.step < total:
            self._checkpoint_reports.ended_early(self.step, total)
        self._saver.clean_up()

    def end(self) -> None:
        """End what runs beside the training, at the end of the session."""
        if self._started is not None:
            self._started.end()

    @property
    def _stopping(self) -> Stopping:
        assert self._started is not None  # the loop has started
        return self._started

    def _begin(self, length: int, *, by_epoch: bool, last_step: int | None = None) -> MicroBatches | NoBatches:
        """Resume, and agree on the start. `length` is in steps or epochs. A collective."""
        if self._batches is not None:
            raise UserError(SECOND_LOOP.format("epochs" if by_epoch else "steps"))
        identity = agree(self._data, length, by_epoch=by_epoch, last_step=last_step, context=self._context)
        self._state = replace(self._state, identity=identity, total_steps=self._data.batches.total_steps)
        self.step = self._recorded = resume(self._state, self._data, context=self._context, recovery=self._recovery)
        if self._judge is not None:
            self._judge.report()
        self._batches = read_from(self.step, self._data, self._context)
        self._started = self._make_stopping(
            self._state, self.step, context=self._context, recovery=self._recovery, on_commit=self._committed
        )
        self._boundary = Boundary(
            self._state,
            data=self._data,
            context=self._context,
            recovery=self._recovery,
            meter=self._meter,
            stopping=self._started,
            is_judged=self.is_judged,
        )
        try:
            self._boundary.begin(self.step)
        except BaseException:
            self._batches.close()
            raise
        return self._batches

    def _steps_to(self, stop: int) -> Iterator[Step]:
        """The steps up to a number of completed steps. The last step of the run is committed at once."""
        assert self._batches is not None
        assert self._boundary is not None
        while self.step < stop:
            step = self._new_step(self._batches)
            self._under_way = step, time.monotonic()
            yield step
            try:
                self._complete()
                self._boundary.cross(self.step, has_updated=self._has_updated, pauses=self.pauses)
            except BaseException:  # a drain or an error: the loop over epochs stays suspended
                self._batches.close()
                raise
        if self._data.batches.is_over(self.step):
            self.finish()

    def _new_step(self, batches: MicroBatches | NoBatches) -> Step:
        return Step(
            self.step + 1,
            rank=self._context.rank,
            plan=self.plan,
            batches=batches,
            engine=self._engine,
            meter=self._meter,
            begin=self.begin_micro_batch,
            update=self._update,
        )

    def _update(self) -> None:
        self.begin_update()
        if self.may_update():
            self._engine.update()
        if self._data.steps_schedule(self.step):
            for scheduler in self._state.schedulers.values():
                scheduler.step()
        self.step += 1
        self._stopping.updated(self.step)

    def _committed(self, step: int) -> None:
        """Note that the listener has committed a step, whose completion may be left out."""
        self._record(step)
        self._reporter.update(step=step)

    def _record(self, step: int) -> None:
        if step > self._recorded:
            self._recorded = step
            self._data.record(step)

    def _complete(self) -> None:
        assert self._under_way is not None
        step, started = self._under_way
        if not step.updated:
            raise RuntimeError("step.update() was not called; call it once at the end of each step")
        self._stopping.begin_completion(step.number)
        seconds, self._under_way = time.monotonic() - started, None
        self.step = step.number  # again, for a framework's update
        self._record(self.step)
        self._reporter.step(
            self.step,
            seconds=seconds,
            data_wait_seconds=self._batches.pop_wait() if self._batches is not None else 0.0,
            tokens=self._data.tokens(self.step),
            samples=self._data.num_samples(self.step),
            facts=partial(self._data.facts, self.step),
        )
        self._saver.poll()
