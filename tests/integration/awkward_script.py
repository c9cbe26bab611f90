"""Awkward models in the loops of this library and of others, one session after the other.

test_awkward_models.py runs it as ranks. RANK_SETTINGS comes from the test: the cases of this world, each with the
number of its turn and how many it has, and where they have their commits. After the last turn, rank 0 saves the
trained model. All ranks write what they were refused.
"""

import json
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402

import spottrain  # noqa: E402
from awkward_models import (  # noqa: E402
    CLIP,
    DECAY,
    GLOBAL_BATCH,
    MICRO_BATCH,
    STEPS_A_WORLD,
    Averaged,
    Awkward,
    Unused,
    make_model,
    make_optimizer,
    samples,
)
from sessions_in_one_world import run_sessions  # noqa: E402
from spottrain.loop.training import Training  # noqa: E402
from spottrain_api.settings.training import DeepSpeedConfig, FsdpConfig  # noqa: E402

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
RANK, WORLD = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
MOST_TURNS = 3
DATA = samples(MOST_TURNS)


def ask_to_drain(optimizer: torch.optim.Optimizer) -> None:
    """After the first step of this world, so that it drains after the second."""
    optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def follow(training: Training, model: Awkward) -> None:
    if isinstance(model, Averaged):
        training.update_average(model.teacher, model.student, decay=DECAY)


def train_alone(session: spottrain.Session, model: Awkward, total: int) -> Training:
    training = session.prepare(model, optimizer=make_optimizer, dataset=DATA, shuffle=False, clip_grad_norm=CLIP)
    for step in training.steps(total=total):
        for batch in step.micro_batches():
            step.backward(training.model(**batch)["loss"])
        step.update()
        follow(training, model)
        os.kill(os.getpid(), signal.SIGTERM)
    return training


def train_with_transformers(session: spottrain.Session, model: Awkward, total: int) -> Training:
    from transformers import TrainingArguments

    from spottrain.adapters.transformers import SpottrainTrainer

    optimizer = make_optimizer(model)
    args = TrainingArguments(
        output_dir=RANK_SETTINGS["folder"],
        max_steps=total,
        max_grad_norm=CLIP,
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        log_level="error",
        ddp_find_unused_parameters=isinstance(model, Unused),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = SpottrainTrainer(
        session=session, model=model, args=args, train_dataset=DATA, optimizers=(optimizer, schedule)
    )
    ask_to_drain(optimizer)
    trainer.train()
    return trainer.loop.training


def train_with_lightning(session: spottrain.Session, model: Awkward, total: int) -> Training:
    import lightning.pytorch as lightning

    from spottrain.adapters.lightning import SpottrainCallback, SpottrainStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = make_optimizer(self.model)
            ask_to_drain(optimizer)
            return optimizer

    strategy = SpottrainStrategy(session, DATA, shuffle=False, find_unused_parameters=isinstance(model, Unused))
    trainer = lightning.Trainer(
        max_steps=total,
        gradient_clip_val=CLIP,
        strategy=strategy,
        callbacks=[SpottrainCallback(strategy)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **strategy.placement,
    )
    trainer.fit(Module(), strategy.batches)
    return strategy.loop.training


def train_with_accelerate(session: spottrain.Session, model: Awkward, total: int, **plugins: Any) -> Training:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from spottrain.adapters.accelerate import AcceleratedLoop

    ddp = DistributedDataParallelKwargs(find_unused_parameters=isinstance(model, Unused))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp], **plugins)
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model))
    ask_to_drain(optimizer.optimizer)
    loop = AcceleratedLoop(session, accelerator, prepared, optimizer, DATA, total=total, shuffle=False)
    for batch in loop.batches():
        with accelerator.accumulate(prepared):
            accelerator.backward(loop.weigh(prepared(**batch)["loss"]))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            follow(loop.training, model)
    return loop.training


def train_with_accelerates_fsdp(session: spottrain.Session, model: Awkward, total: int) -> Training:
    from accelerate import FullyShardedDataParallelPlugin

    wrapped = {type(child).__name__ for name, child in model.named_modules() if name in ("blocks.0", "layers.0")}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted(wrapped),
    )
    return train_with_accelerate(session, model, total, fsdp_plugin=plugin)


LOOPS: dict[str, Callable[[spottrain.Session, Awkward, int], Training]] = {
    "transformers": train_with_transformers,
    "lightning": train_with_lightning,
    "accelerate": train_with_accelerate,
    "accelerate fsdp kept": train_with_accelerates_fsdp,
}
# The job's strategy and settings under this library's own loop.
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp kept": {"strategy": "fsdp", "fsdp": FsdpConfig(reshard_after_forward=False)},
    **{
        f"zero {stage}": {"strategy": "deepspeed", "deepspeed": DeepSpeedConfig(zero_stage=stage)}
        for stage in range(4)
    },
}


def forget_frameworks() -> None:
    """Accelerate keeps its settings in the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def run(model: str, loop: str, turn: int, turns: int) -> None:
    """One session, which ends with SystemExit if it drains or is refused."""
    engines = loop.split(", ")  # of each turn
    engine = ENGINES.get(engines[turn % len(engines)], {"strategy": "auto"})
    forget_frameworks()
    with spottrain.session(
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        strategy=engine["strategy"],
        checkpoint_uri=f"file://{RANK_SETTINGS['folder']}/{model}/{loop}",
        checkpoint_interval="100steps",
    ) as session:
        session.config = session.config.model_copy(update={k: v for k, v in engine.items() if k != "strategy"})
        training = LOOPS.get(loop, train_alone)(session, make_model(model), STEPS_A_WORLD * turns)
        trained = training.full_state_dict()
        if RANK == 0:
            torch.save(trained, f"{RANK_SETTINGS['folder']}/{model}/{loop}.pt")


errors = run_sessions((f"{case[0]}: {case[1]}", partial(run, *case)) for case in RANK_SETTINGS["cases"])
Path(f"{RANK_SETTINGS['result']}-{RANK}").write_text(json.dumps(errors))
