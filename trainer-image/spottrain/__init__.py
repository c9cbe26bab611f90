"""Training that survives preemptions.

The script that every rank runs has `import spottrain`. `spottrain.session()` surrounds the script,
`Session.prepare` takes the model and the data, and `Training.steps` is the loop. `Session.prepare` has an example.
A loop of the script's own ends its steps by `Run.boundary` instead, with what `Session.attach` was given.
"""

from spottrain.loop.entry import session
from spottrain.loop.run import Run
from spottrain.loop.session import Session
from spottrain.loop.step import Step
from spottrain.loop.training import Training
from spottrain.recovery.by_rank import ByRank
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import LossSpikeConfig, StabilityConfig

__all__ = [
    "ByRank",
    "LossSpikeConfig",
    "Run",
    "Session",
    "StabilityAction",
    "StabilityConfig",
    "Step",
    "Training",
    "session",
]
