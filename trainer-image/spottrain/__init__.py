"""Training that survives preemptions.

The script that every rank runs has `import spottrain`. `spottrain.session()` surrounds the script,
`Session.prepare` takes the model and the data, and `Training.steps` is the loop. `Session.prepare` has an example.
"""

from spottrain.loop.entry import session
from spottrain.loop.session import Session
from spottrain.loop.step import Step
from spottrain.loop.training import Training
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import LossSpikeConfig, StabilityConfig

__all__ = ["LossSpikeConfig", "Session", "StabilityAction", "StabilityConfig", "Step", "Training", "session"]
