"""The training script that test_adapters.py runs as ranks.

It trains in the loop of a framework or in spottrain's own. RANK_SETTINGS comes from the test.
"""

import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spottrain  # noqa: E402
from spottrain.checkpoint.format.head import read_head  # noqa: E402
from spottrain.checkpoint.stores.uri import open_storage  # noqa: E402
from spottrain.loop import stopping  # noqa: E402
from spottrain.world import listener  # noqa: E402
from spottrain_api.contract.configuration import DrainRequest  # noqa: E402

torch.set_num_threads(1)
if RANK_SETTINGS["commits_at_once"]:
    listener.LISTEN_AFTER_SECONDS = 0.0
    stopping.Commits.seconds_needed = lambda self, seconds_left: seconds_left  # type: ignore[method-assign]
warnings.filterwarnings("ignore")
STEPS: int = RANK_SETTINGS["steps"]
# Compiled by the framework (the backend "eager" needs no compiler), in bf16, and activations recomputed.
ALL_ON = "ALL_ON" in os.environ
# Evaluate after steps, and stop when it has got worse so often; a drain puts an evaluation off.
EVALUATES = "EVALUATES" in os.environ
LAST_STEP = 12 if EVALUATES else STEPS
# Evaluate where an epoch ends: 48 samples fill four steps of 10 and one of 8.
BY_EPOCHS = "BY_EPOCHS" in os.environ
STOPPING = {"monitor": "score", "mode": "max", "patience": LAST_STEP - 1, "check_on_train_epoch_end": False}
# Statistics that follow the samples of a rank, and parameters of which one is used late and one never.
IS_ODD = "IS_ODD" in os.environ
MISUSE = os.environ.get("MISUSE")
spoil: dict[bool, bool] = {}  # whether the next loss is to be spoilt


class Model(nn.Module):
    num_batches: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(RANK_SETTINGS["dropout"])
        norms = [nn.BatchNorm1d(8)] if IS_ODD else []
        self.spare = nn.ParameterList(torch.zeros(1) for _ in range(2 * IS_ODD))
        if IS_ODD:
            self.register_buffer("num_batches", torch.tensor(0))
        self.layers = nn.Sequential(nn.Linear(8, 8), *norms, nn.Tanh(), self.dropout, nn.Linear(8, 1))
        self.recomputes = False

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        """As models of transformers have it."""
        self.recomputes = True

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.layers, x, use_reentrant=False).squeeze(1)
        return self.layers(x).squeeze(1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean loss, as most models do.

        The fault that spoils it affects the first micro-batch after its step.
        """
        loss = (self.predict(x) - labels).square().mean()
        if IS_ODD and self.training:
            self.num_batches += 1
            if self.num_batches > 16:  # from the ninth step on
                loss = loss + (self.spare[0] - 1).square().sum()
        return {"loss": loss * (math.nan if self.training and spoil.pop(True, False) else 1.0)}


class ModelThatCounts(Model):
    """A model that divides by the labels of the whole global batch.

    Language models do so in Hugging Face's Trainer.
    """

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        if num_items_in_batch is None:
            return super().forward(x, labels)
        squares = (self.predict(x) - labels).square()
        return {"loss": torch.where(labels == -100, 0.0, squares).sum() / num_items_in_batch}


class ModelThatIgnoresTheCount(Model):
    """A model that is passed the count of labels and takes a mean all the same.

    BERT's classifiers do so. If all labels are ignored, the mean is not a number.
    """

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        squares = (self.predict(x) - labels).square()
        return {"loss": squares[labels != -100].mean()}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With the faults that the test wants, by the steps of this generation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = iter(range(1, STEPS + 1))
    optimizer.register_step_pre_hook(lambda *_: strike(next(steps)))
    return optimizer


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


def ask_to_drain() -> None:
    now = datetime.now(UTC)
    request = DrainRequest(reason="test", deadline=now + timedelta(seconds=60), requested_at=now)
    request.write(Path(os.environ["SPOTTRAIN_RUN_DIR"]) / "drain.json")


def strike_in_evaluation(step: int) -> None:
    """In an evaluation after a step of the run, which goes on until the step is committed: a notice for a rank."""
    if (fault := RANK_SETTINGS["faults"].pop(f"{step}+", None)) is not None:
        storage = open_storage(RANK_SETTINGS["uri"])
        if fault == "notice":
            ask_to_drain()
        while (head := read_head(storage)) is None or head.newest is None or head.newest.step < step:
            time.sleep(0.01)


def strike(step: int) -> None:
    match RANK_SETTINGS["faults"].get(step):
        case "drain":
            ask_to_drain()
        case "nan":
            spoil[True] = True
        case "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)


def train_alone(session: spottrain.Session, *, by_epoch: bool = False) -> nn.Module:
    model = Model()
    training = session.prepare(
        model, optimizer=make_optimizer, scheduler=make_scheduler, dataset=dataset, clip_grad_norm=5.0
    )
    epochs = training.epochs(STEPS, total=STEPS) if by_epoch else [training.steps(total=STEPS)]
    for step in (step for epoch in epochs for step in epoch):
        for batch in step.micro_batches():
            step.backward(training.model(**batch)["loss"])
        step.update()
    return model


def train_with_transformers(
    session: spottrain.Session, model: nn.Module, *, computes_loss: bool = False
) -> nn.Module:
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

    from spottrain.adapters.transformers import SpottrainTrainer

    optimizer = make_optimizer(model)
    misused_arguments: dict[str, dict[str, Any]] = {
        "order": {"train_sampling_strategy": "batch_rebalance"},
        "drop last": {"dataloader_drop_last": True, "data_seed": 3},
    }
    args = TrainingArguments(
        output_dir=str(Path(RANK_SETTINGS["result"]).parent),
        max_steps=STEPS,
        max_grad_norm=5.0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=IS_ODD,
        bf16=ALL_ON,
        gradient_checkpointing=ALL_ON,
        torch_compile=ALL_ON,
        torch_compile_backend="eager" if ALL_ON else None,
        log_level="error",
        eval_strategy="epoch" if BY_EPOCHS else "steps" if EVALUATES else "no",
        eval_steps=1,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that each evaluation is taken for a worse one
        dataloader_num_workers=int(ALL_ON),
        dataloader_prefetch_factor=1 if ALL_ON else None,
        dataloader_multiprocessing_context="fork" if ALL_ON else None,  # the test's ranks have another default
        **misused_arguments.get(str(MISUSE), {}),
    )

    class Striking(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            strike_in_evaluation(state.global_step)

    class Repeating:
        """As GRPO's trainer has it."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return [0, 0, 1, 1]

    class RepeatingTrainer(SpottrainTrainer, Repeating, Trainer):
        pass

    class TrainerWithALoss(SpottrainTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    misused = {"sampler": RepeatingTrainer}
    trainer = misused.get(
        str(MISUSE), TrainerWithALoss if computes_loss else SpottrainTrainer
    )(
        session=session,
        model=model,
        args=args,
        train_dataset=torch.utils.data.DataLoader(dataset) if MISUSE == "loader" else dataset,  # type: ignore[arg-type]
        eval_dataset=dataset[:5],
        callbacks=[EarlyStoppingCallback(LAST_STEP - 1), Striking()] if EVALUATES else [],
        optimizers=(optimizer, make_scheduler(optimizer)),
    )
    trainer.train()
    if hasattr(model, "peft_config") and session.rank == 0:
        model.save_pretrained(Path(RANK_SETTINGS["result"]).with_name("adapters"))  # type: ignore[operator]
    every_step = list(range(1, LAST_STEP + 1))
    for kind, logged in (("loss", every_step), ("eval_loss", [5, 10, 14] if BY_EPOCHS else every_step * EVALUATES)):
        assert [entry["step"] for entry in trainer.state.log_history if kind in entry] == logged
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """Two, one of which is trained, with a layer that is trained as a whole."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["layers.0"], modules_to_save=["layers.3"])
    adapted = get_peft_model(model, config)
    adapted.add_adapter("other", LoraConfig(r=3, target_modules=["layers.0"]))
    return adapted


def train_with_lightning(session: spottrain.Session) -> nn.Module:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging

    from spottrain.adapters.lightning import SpottrainCallback, SpottrainStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.automatic_optimization = MISUSE != "manual"
            if ALL_ON:
                self.model.gradient_checkpointing_enable()
            self.num_batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.num_batches += 1

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["num_batches"] = object() if MISUSE == "pickle" else self.num_batches

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.num_batches = checkpoint["num_batches"]

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            self.model(**batch)
            self.log("score", -float(self.global_step))
            strike_in_evaluation(self.global_step)

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = make_optimizer(self.model)
            schedule = {"scheduler": make_scheduler(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    module = Module()
    strategy = SpottrainStrategy(session, dataset, find_unused_parameters=IS_ODD)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        gradient_clip_val=5.0 if MISUSE != "manual" else None,
        val_check_interval=1 if EVALUATES else 1.0,
        precision="bf16-mixed" if ALL_ON else "32-true",
        strategy=strategy,
        callbacks=[
            # At each but the first; only the best is kept.
            *([EarlyStopping(**STOPPING)] if EVALUATES else []),
            *([ModelCheckpoint(RANK_SETTINGS["result"] + "-best", monitor="score", mode="max")] if EVALUATES else []),
            SpottrainCallback(strategy),
            *([WeightAveraging()] if MISUSE == "averages" else []),
        ],
        logger=False,
        enable_checkpointing=EVALUATES,
        enable_progress_bar=False,
        enable_model_summary=False,
        **strategy.placement,
    )
    data = torch.utils.data.DataLoader(dataset) if MISUSE == "data" else strategy.batches  # type: ignore[arg-type, var-annotated]
    trainer.fit(module, data, torch.utils.data.DataLoader(dataset[:5]) if EVALUATES else None)  # type: ignore[arg-type]
    assert trainer.global_step == LAST_STEP
    if session.config.generation < 3:  # the last has the same number of ranks
        assert not EVALUATES or module.num_batches == LAST_STEP * trainer.accumulate_grad_batches
    return module.model


class Patience:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.left = torch.tensor(LAST_STEP)

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.left = state_dict["left"]


def train_with_accelerate(session: spottrain.Session, *, static_graph: bool = False) -> nn.Module:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from spottrain.adapters.accelerate import AcceleratedLoop

    on = {"mixed_precision": "bf16", "dynamo_backend": "eager"} if ALL_ON else {}
    ddp = DistributedDataParallelKwargs(find_unused_parameters=IS_ODD, static_graph=static_graph)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp], **on)
    plain = Model()
    if ALL_ON:
        plain.gradient_checkpointing_enable()
    optimizer = make_optimizer(plain)
    if MISUSE == "models":
        accelerator.prepare(nn.Linear(1, 1))
    model, optimizer, scheduler = accelerator.prepare(plain, optimizer, make_scheduler(optimizer))
    patience = Patience()
    accelerator.register_for_checkpointing(patience)
    loop = AcceleratedLoop(session, accelerator, model, optimizer, dataset, scheduler=scheduler, total=STEPS)
    for batch in loop.batches():
        if patience.left == 0:
            break
        with nullcontext() if MISUSE == "accumulation" else accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss if MISUSE == "weight" else loop.weigh(loss))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            patience.left -= int(accelerator.sync_gradients)
        if EVALUATES and accelerator.sync_gradients:
            with loop.evaluation():
                strike_in_evaluation(loop.step + 1)
    assert patience.left == 0
    return plain


LOOPS: dict[str, Callable[[spottrain.Session], nn.Module]] = {
    "none": train_alone,
    "none-by-epoch": lambda session: train_alone(session, by_epoch=True),
    "transformers": lambda session: train_with_transformers(session, Model()),
    "transformers-counting": lambda session: train_with_transformers(session, ModelThatCounts()),
    "transformers-ignoring": lambda session: train_with_transformers(session, ModelThatIgnoresTheCount()),
    "transformers-own-loss": lambda session: train_with_transformers(session, Model(), computes_loss=True),
    "transformers-peft": lambda session: train_with_transformers(session, with_adapters(Model())),
    "lightning": train_with_lightning,
    "accelerate": train_with_accelerate,
    "accelerate-static": lambda session: train_with_accelerate(session, static_graph=True),
}

generator = torch.Generator().manual_seed(1)
inputs = torch.randn(48, 8, generator=generator)
dataset = [{"x": row, "labels": row.sum()} for row in inputs]

with spottrain.session() as session:
    trained = LOOPS[RANK_SETTINGS["loop"]](session)
    if session.rank == 0:
        torch.save({name: value.detach() for name, value in trained.state_dict().items()}, RANK_SETTINGS["result"])
