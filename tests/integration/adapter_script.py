"""The training script that test_adapters.py runs as ranks, in the loop of a framework or in spottrain's own.

RANK_SETTINGS comes from the test.
"""

import math
import os
import signal
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spottrain  # noqa: E402
from spottrain_api.contract import DrainRequest  # noqa: E402

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
STEPS: int = RANK_SETTINGS["steps"]
# Compiled by the framework (the backend "eager" needs no compiler), in bf16, and activations recomputed.
ALL_ON = "ALL_ON" in os.environ
spoil: dict[bool, bool] = {}  # whether the next loss is to be spoilt


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(RANK_SETTINGS["dropout"])
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), self.dropout, nn.Linear(8, 1))
        self.recomputes = False

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        """As models of transformers have it."""
        self.recomputes = True

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.layers, x, use_reentrant=False).squeeze(1)
        return self.layers(x).squeeze(1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean loss, as most models return it; spoilt in the first micro-batch after a step with that fault."""
        loss = (self.predict(x) - labels).square().mean()
        return {"loss": loss * (math.nan if spoil.pop(True, False) else 1.0)}


class ModelThatCounts(Model):
    """As language models do in Hugging Face's Trainer: divides by the labels of the whole global batch."""

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        if num_items_in_batch is None:
            return super().forward(x, labels)
        squares = (self.predict(x) - labels).square()
        return {"loss": torch.where(labels == -100, 0.0, squares).sum() / num_items_in_batch}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With the faults that the test wants, by the steps of this generation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = iter(range(1, STEPS + 1))
    optimizer.register_step_pre_hook(lambda *_: strike(next(steps)))
    return optimizer


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


def strike(step: int) -> None:
    now = datetime.now(UTC)
    match RANK_SETTINGS["faults"].get(step):
        case "drain":
            request = DrainRequest(reason="test", deadline=now + timedelta(seconds=60), requested_at=now)
            request.write(Path(os.environ["SPOTTRAIN_RUN_DIR"]) / "drain.json")
        case "nan":
            spoil[True] = True
        case "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)


def train_alone(session: spottrain.Session) -> nn.Module:
    model = Model()
    training = session.prepare(
        model, optimizer=make_optimizer, scheduler=make_scheduler, dataset=dataset, clip_grad_norm=5.0
    )
    for step in training.steps(total=STEPS):
        for batch in step.micro_batches():
            step.backward(training.model(**batch)["loss"])
        step.update()
    return model


def train_with_transformers(session: spottrain.Session, model: nn.Module) -> nn.Module:
    from transformers import TrainingArguments

    from spottrain.adapters.transformers import SpottrainTrainer

    optimizer = make_optimizer(model)
    args = TrainingArguments(
        output_dir=str(Path(RANK_SETTINGS["result"]).parent),
        max_steps=STEPS,
        max_grad_norm=5.0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        bf16=ALL_ON,
        gradient_checkpointing=ALL_ON,
        torch_compile=ALL_ON,
        torch_compile_backend="eager" if ALL_ON else None,
        log_level="error",
    )
    trainer = SpottrainTrainer(
        session=session,
        model=model,
        args=args,
        train_dataset=dataset,
        optimizers=(optimizer, make_scheduler(optimizer)),
    )
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == list(range(1, STEPS + 1))
    return model


def train_with_lightning(session: spottrain.Session) -> nn.Module:
    import lightning.pytorch as lightning

    from spottrain.adapters.lightning import SpottrainCallback, SpottrainStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            if ALL_ON:
                self.model.gradient_checkpointing_enable()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = make_optimizer(self.model)
            schedule = {"scheduler": make_scheduler(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    module = Module()
    strategy = SpottrainStrategy(session, dataset)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        gradient_clip_val=5.0,
        precision="bf16-mixed" if ALL_ON else "32-true",
        strategy=strategy,
        callbacks=[SpottrainCallback(strategy)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **strategy.placement,
    )
    trainer.fit(module, strategy.batches)
    assert trainer.global_step == STEPS
    return module.model


def train_with_accelerate(session: spottrain.Session) -> nn.Module:
    from accelerate import Accelerator

    from spottrain.adapters.accelerate import AcceleratedLoop

    on = {"mixed_precision": "bf16", "dynamo_backend": "eager"} if ALL_ON else {}
    accelerator = Accelerator(cpu=True, **on)
    plain = Model()
    if ALL_ON:
        plain.gradient_checkpointing_enable()
    optimizer = make_optimizer(plain)
    model, optimizer, scheduler = accelerator.prepare(plain, optimizer, make_scheduler(optimizer))
    loop = AcceleratedLoop(session, accelerator, model, optimizer, dataset, scheduler=scheduler, total=STEPS)
    for batch in loop.batches():
        with accelerator.accumulate(model):
            accelerator.backward(loop.weigh(model(**batch)["loss"]))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return plain


LOOPS: dict[str, Callable[[spottrain.Session], nn.Module]] = {
    "none": train_alone,
    "transformers": lambda session: train_with_transformers(session, Model()),
    "transformers-counting": lambda session: train_with_transformers(session, ModelThatCounts()),
    "lightning": train_with_lightning,
    "accelerate": train_with_accelerate,
}

generator = torch.Generator().manual_seed(1)
inputs = torch.randn(46, 8, generator=generator)
dataset = [{"x": row, "labels": row.sum()} for row in inputs]

with spottrain.session() as session:
    trained = LOOPS[RANK_SETTINGS["loop"]](session)
    if session.rank == 0:
        torch.save({name: value.detach() for name, value in trained.named_parameters()}, RANK_SETTINGS["result"])
