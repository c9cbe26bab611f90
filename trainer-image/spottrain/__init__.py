"""Training that survives preemptions: `import spottrain` in the script that every rank runs.

with spottrain.session() as session:
    training = session.prepare(
        model, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4), dataset=dataset
    )
    for step in training.steps(total=400):
        for inputs, targets in step.micro_batches():
            step.backward(loss_of(training.model(inputs), targets))  # the mean over the micro-batch
        step.update()
"""

from spottrain.session import Session, session
from spottrain.step import Step
from spottrain.training import Training
from spottrain_api.contract import LossSpikeConfig, StabilityAction, StabilityConfig

__all__ = ["LossSpikeConfig", "Session", "StabilityAction", "StabilityConfig", "Step", "Training", "session"]
