"""Options of optimizers: what the script gave, what a commit held, and what changed them.

A resume continues with those of the commit. The script's other value has no effect then, unless the script sets the
option itself in its steps. A commit holds who did what, so that a resume can tell the cases apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from spottrain.recovery.saved_schedule import as_plain

# Options of an optimizer's groups that scripts set and commits hold. Schedules keep the rate as initial_lr.
_OPTIONS = ("lr", "weight_decay", "betas", "momentum", "eps")

Options = Mapping[str, Sequence[Mapping[str, Any]]]
"""Options of each optimizer's groups: numbers and tuples of numbers. Some optimizers have None for a rate."""


def options_of(optimizers: Mapping[str, Optimizer]) -> Options:
    """The optimizers' options as they are now, before what a schedule makes of them."""
    return {
        name: [
            {each: as_plain(group.get(f"initial_{each}", group[each])) for each in _OPTIONS if each in group}
            for group in optimizer.param_groups
        ]
        for name, optimizer in optimizers.items()
    }


@dataclass(slots=True)
class OptionHistory:
    """What became of the options in this run.

    Attributes:
        script: What the script gave the optimizer in this generation.
        start: Those with which this generation started to train.
        set_in_steps: Options that the script was seen to set in its steps, in earlier generations.
    """

    script: Options = field(default_factory=dict)
    start: Options = field(default_factory=dict)
    set_in_steps: set[str] = field(default_factory=set)

    def begin(self, script: Options) -> None:
        """Note what the script gave; before a commit is loaded."""
        self.script = self.start = script

    def resumed(self, now: Options, saved: Mapping[str, Any]) -> None:
        """Note the options of the commit that was loaded, and what it knows of them."""
        self.start = now
        self.set_in_steps = set(saved.get("set_in_steps", ()))

    def record(self, now: Options) -> dict[str, Any]:
        """What a commit holds about the options `now`."""
        moved = {name for name in _OPTIONS if _digest(now, name) != _digest(self.start, name)}
        return {
            "script": {name: _digest(self.script, name) for name in _OPTIONS},
            "set_in_steps": sorted(self.set_in_steps | moved),
        }

    def without_effect(self, now: Options, saved: Mapping[str, Any], step: int) -> Iterator[str]:
        """A sentence about options that the script gives, and that a commit has replaced.

        Args:
            now: The options as they are after the load.
            saved: What `record` returned before the commit. Values that the script gave then, too, are no news, and
                those that it sets in its steps have an effect.
            step: Step of the commit.
        """
        given, in_steps = saved.get("script", {}), saved.get("set_in_steps", ())
        new = {name for name in _OPTIONS if name not in in_steps and given.get(name) != _digest(self.script, name)}
        differing: dict[str, str] = {}
        pairs = [pair for name, groups in now.items() for pair in zip(groups, self.script[name], strict=True)]
        for values, script in pairs:
            for name in new & script.keys() & values.keys():
                if values[name] != script[name]:
                    differing.setdefault(name, f"{name} {values[name]} (in the script: {script[name]})")
        if differing:
            which = ", ".join(differing[name] for name in _OPTIONS if name in differing)
            yield (
                f"The optimizer continues with the options of the checkpoint at step {step}, which differ from the "
                f"script's: {which}. To change options of a run, see 'Change the learning rate' in "
                "docs/how-to/resume-fork-export.md."
            )


def _digest(options: Options, name: str) -> str:
    """Stands for an option's values in all groups, of which there may be thousands."""
    values = {key: [group.get(name) for group in groups] for key, groups in sorted(options.items())}
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
