"""Loops as people write them, for the library and for a single process without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import default_collate

import spottrain
from loop_parts import (
    NUM_SAMPLES,
    TOTAL,
    WIDTH,
    Loop,
    Weigh,
    batches,
    plain_state,
    samples,
    spread,
)
from playing_loops import EPISODES, Q_BATCH, actor_critic, q_learning


class Towers(nn.Module):
    """Two encoders and the scale of their products, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.image, self.text = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        one, other = (functional.normalize(each, dim=-1) for each in (self.image(images), self.text(texts)))
        return one, other, self.scale.exp().reshape(1)


def contrastive(images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each image's text among all texts of the batch, and the other way round (Radford et al., 2021)."""
    logits = scale * images @ texts.T
    labels = torch.arange(len(logits))
    return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def contrastive_loop(global_batch: int, *, is_attached: bool = False) -> Loop:
    def train(session: spottrain.Session, after_step: Callable[[], None]) -> Mapping[str, Any]:
        training = session.prepare(Towers(), optimizer=adam, dataset=samples(), shuffle=False)
        for step in training.steps(total=TOTAL):
            for images, texts in step.micro_batches():
                one, other, scale = training.model(images, texts)
                step.backward(contrastive(step.gather(one), step.gather(other), scale))
            loss = training.step_loss()
            step.update()
            assert math.isfinite(loss)
            after_step()
        return training.full_state_dict()

    def attached(session: spottrain.Session, after_step: Callable[[], None]) -> Mapping[str, Any]:
        model = session.spread(Towers())
        optimizer = adam(model)
        run = session.attach(total=TOTAL, dataset=samples(), shuffle=False, model=model, optimizer=optimizer)
        for images, texts in run.batches():
            one, other, scale = model(images, texts)
            loss = contrastive(run.gather(one), run.gather(other), scale)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            run.boundary(loss)
            after_step()
        return run.full_state_dict()

    def plain() -> Mapping[str, Any]:
        model = Towers()
        optimizer = adam(model)
        for images, texts in batches(global_batch):
            optimizer.zero_grad()
            torch.autograd.backward(contrastive(*model(images, texts)))
            optimizer.step()
        return model.state_dict()

    return Loop(attached if is_attached else train, plain, global_batch, micro_batch=global_batch)


LOOPS = {
    "contrastive": contrastive_loop(7),
    "contrastive with idle ranks": contrastive_loop(2),
    "contrastive, attached": contrastive_loop(7, is_attached=True),
    "contrastive, attached, with idle ranks": contrastive_loop(2, is_attached=True),
}


def noise(step: int, size: int) -> torch.Tensor:
    """The noise of a step's global batch, whoever computes with it."""
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(1000 + step))


def networks() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator."""
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, WIDTH))
    discriminator = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    return generator, discriminator


def score(discriminator: nn.Module, samples: torch.Tensor, *, real: bool) -> torch.Tensor:
    logits = discriminator(samples)
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


GAN_BATCH = 6


class Gan:
    """Two networks with an optimizer each, in turns (Goodfellow et al., 2014), and an average of the generator."""

    def __init__(self, spread: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        self.generator, self.discriminator = map(spread, networks())
        self.average = AveragedModel(self._inner, avg_fn=lambda average, new, _: (average + new) / 2)
        self.of_generator, self.of_discriminator = (
            torch.optim.Adam(each.parameters(), lr=0.01, betas=(0.5, 0.999))
            for each in (self.generator, self.discriminator)
        )
        self.decay = torch.optim.lr_scheduler.ExponentialLR(self.of_generator, 0.9)

    @property
    def _inner(self) -> nn.Module:
        inner: nn.Module = getattr(self.generator, "module", self.generator)
        return inner

    def step(self, real: torch.Tensor, noise: torch.Tensor, weigh: Weigh = lambda loss: loss) -> torch.Tensor:
        fake = self.generator(noise)
        self.of_discriminator.zero_grad()
        loss = score(self.discriminator, real, real=True) + score(self.discriminator, fake.detach(), real=False)
        torch.autograd.backward(weigh(loss))
        self.of_discriminator.step()
        self.of_generator.zero_grad()
        torch.autograd.backward(weigh(score(self.discriminator, fake, real=True)))
        self.of_generator.step()
        self.decay.step()
        self.average.update_parameters(self._inner)
        return weigh(loss)

    def weights(self) -> dict[str, torch.Tensor]:
        return plain_state(generator=self.generator, discriminator=self.discriminator, average=self.average.module)


def train_gan(session: spottrain.Session, after_step: Callable[[], None]) -> Mapping[str, Any]:
    gan = Gan(partial(spread, session))
    run = session.attach(total=TOTAL, **vars(gan))
    data = [image for image, _ in samples()]
    while run.step < run.total:
        real = torch.stack([data[position % NUM_SAMPLES] for position in run.share])
        own = noise(run.step, GAN_BATCH)[[position % GAN_BATCH for position in run.share]]
        run.boundary(gan.step(real, own, run.weigh))
        after_step()
    return gan.weights()


def plain_gan() -> Mapping[str, Any]:
    gan = Gan()
    for step, (real, _) in enumerate(batches(GAN_BATCH)):
        gan.step(real, noise(step, GAN_BATCH))
    return gan.weights()


LOOPS["gan"] = Loop(train_gan, plain_gan, GAN_BATCH, GAN_BATCH)
LOOPS["q learning"] = Loop(q_learning, lambda: q_learning(None, lambda: None), Q_BATCH, Q_BATCH)


MESH_BATCH = 8


class Mlp(nn.Module):
    """Two layers, of which the first is split by its outputs and the second by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.up, self.down, self.norm = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(inputs + self.down(torch.tanh(self.up(inputs))))  # type: ignore[no-any-return]


def train_on_mesh(session: spottrain.Session, after_step: Callable[[], None]) -> Mapping[str, Any]:
    """FSDP2 over nodes, tensor parallelism inside, as torch's own tutorial has them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    num_nodes = session.world_size // 2
    mesh = init_device_mesh("cpu", (num_nodes, 2), mesh_dim_names=("nodes", "inside"))
    model = Mlp()
    parallelize_module(model, mesh["inside"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["nodes"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = session.attach(total=TOTAL, model=model, optimizer=optimizer)
    size, node = MESH_BATCH // num_nodes, session.rank // 2
    data = samples()
    while run.step < run.total:
        first = run.step * MESH_BATCH + node * size
        inputs, targets = zip(*(data[position % NUM_SAMPLES] for position in range(first, first + size)), strict=True)
        loss = functional.mse_loss(model(torch.stack(inputs)), torch.stack(targets))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        run.boundary(loss)
        after_step()
    return run.full_state_dict()


def plain_mesh() -> Mapping[str, Any]:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for inputs, targets in batches(MESH_BATCH):
        optimizer.zero_grad()
        torch.autograd.backward(functional.mse_loss(model(inputs), targets))
        optimizer.step()
    return model.state_dict()


COLUMNS, LENGTH = 6, 3


class Recurrent(nn.Module):
    """A recurrent network whose hidden state is carried from one step's text to the next's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(19)
        self.cell, self.out = nn.RNN(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, text: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found, hidden = self.cell(text, hidden)
        return self.out(found), hidden


def text_of(step: int) -> torch.Tensor:
    return torch.randn(LENGTH + 1, COLUMNS, WIDTH, generator=torch.Generator().manual_seed(step))


def redealt(every: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """The hidden states of a rank's columns."""
    columns = torch.cat([each["hidden"] for each in every], dim=1)
    return {"hidden": columns[:, rank * COLUMNS // world_size : (rank + 1) * COLUMNS // world_size]}


def train_recurrent(session: spottrain.Session | None, after_step: Callable[[], None]) -> Mapping[str, Any]:
    """Carried states, of each rank's columns, and a rate that the script lowers in every step."""
    model = Recurrent()
    network = spread(session, model) if session is not None else model
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    run = None
    size = COLUMNS if session is None else len(session.batch_plan.share(session.rank, range(COLUMNS)))
    carried = {"hidden": torch.zeros(1, size, 5)}
    if session is not None:
        mine = spottrain.ByRank(carried, at_another_size=redealt)
        run = session.attach(total=TOTAL, model=network, optimizer=optimizer, carried=mine)
    for step in range(TOTAL) if run is None else iter(lambda: run.step, TOTAL):
        own = list(range(COLUMNS)) if run is None else [position % COLUMNS for position in run.share]
        text = text_of(step)[:, own]
        found, hidden = network(text[:-1], carried["hidden"])
        loss = functional.mse_loss(found, text[1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss if run is None else run.weigh(loss))
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        carried["hidden"] = hidden.detach()
        if run is not None:
            run.boundary(run.weigh(loss))
            after_step()
    return plain_state(model=network)


LOOPS["carried state"] = Loop(train_recurrent, lambda: train_recurrent(None, lambda: None), COLUMNS, COLUMNS)


class Epochs:
    """A classifier as references train them: a rate by epoch, an evaluation with the best so far, and an average."""

    def __init__(self, spread: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        torch.manual_seed(23)
        self.model = spread(nn.Linear(WIDTH, 3))
        inner: nn.Module = getattr(self.model, "module", self.model)
        self.average = AveragedModel(inner, avg_fn=lambda average, new, _: (average + new) / 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.3)
        self.best: dict[str, Any] = {"loss": math.inf, "epochs": []}

    def step(self, inputs: torch.Tensor, classes: torch.Tensor, weigh: Weigh = lambda loss: loss) -> torch.Tensor:
        loss = functional.cross_entropy(self.model(inputs), classes, label_smoothing=0.1)
        self.optimizer.zero_grad()
        torch.autograd.backward(weigh(loss))
        self.optimizer.step()
        self.average.update_parameters(getattr(self.model, "module", self.model))
        return weigh(loss)

    @torch.no_grad()
    def evaluate(self) -> float:
        return float(self.average(torch.stack([each for each, _ in samples()])).square().mean())

    def end_epoch(self, number: int, found: float) -> None:
        self.schedule.step()
        self.best["loss"] = min(self.best["loss"], found)
        self.best["epochs"].append(number)

    def weights(self) -> dict[str, torch.Tensor]:
        assert self.best["epochs"] == [0, 1]
        best = torch.tensor(self.best["loss"])
        return {**plain_state(model=self.model, average=self.average.module), "best": best}


def classified(number: int) -> list[tuple[torch.Tensor, int]]:
    return [(image, position % 3) for position, (image, _) in enumerate(samples()[:number])]


def epochs_loop(global_batch: int, num_samples: int) -> Loop:
    """Two epochs of three steps, of which the last has what is left."""
    data = classified(num_samples)

    def train(session: spottrain.Session, after_step: Callable[[], None]) -> Mapping[str, Any]:
        own = Epochs(partial(spread, session))
        run = session.attach(epochs=2, dataset=data, shuffle=False, **vars(own))
        for epoch in run.epochs():
            for inputs, classes in epoch:
                run.boundary(own.step(inputs, classes, run.weigh))
                after_step()
            with run.evaluation():
                found = own.evaluate()
            own.end_epoch(epoch.number, found)
        return own.weights()

    def plain() -> Mapping[str, Any]:
        own = Epochs()
        for number in range(2):
            for first in range(0, num_samples, global_batch):
                own.step(*default_collate(data[first : first + global_batch]))
            own.end_epoch(number, own.evaluate())
        return own.weights()

    return Loop(train, plain, global_batch, global_batch)


def train_pair(session: spottrain.Session, after_step: Callable[[], None]) -> Mapping[str, Any]:
    """Two models, each spread by the job's strategy, with an optimizer each."""
    encoder, head = map(session.spread, pair())
    of_encoder, of_head = pair_optimizers(encoder, head)
    attached: dict[str, Any] = {"encoder": encoder, "head": head, "of_encoder": of_encoder, "of_head": of_head}
    run = session.attach(total=TOTAL, dataset=samples(), shuffle=False, **attached)
    for inputs, targets in run.batches():
        loss = step_pair(encoder, head, of_encoder, of_head, inputs, targets, run.weigh)
        run.boundary(loss)
        after_step()
    whole = {name: run.full_state_dict(name) for name in ("encoder", "head")}
    return {f"{name}.{key}": value for name, state in whole.items() for key, value in state.items()}


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(31)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.LayerNorm(5)), nn.Linear(5, WIDTH)


def pair_optimizers(encoder: nn.Module, head: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Adam(encoder.parameters(), lr=0.02), torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)


def step_pair(
    encoder: nn.Module,
    head: nn.Module,
    of_encoder: torch.optim.Optimizer,
    of_head: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    weigh: Weigh = lambda loss: loss,
) -> torch.Tensor:
    loss = functional.mse_loss(head(encoder(inputs)), targets)
    for each in (of_encoder, of_head):
        each.zero_grad()
    torch.autograd.backward(weigh(loss))
    for each in (of_encoder, of_head):
        each.step()
    return loss


def plain_pair() -> Mapping[str, Any]:
    encoder, head = pair()
    optimizers = pair_optimizers(encoder, head)
    for inputs, targets in batches(7):
        step_pair(encoder, head, *optimizers, inputs, targets)
    return plain_state(encoder=encoder, head=head)


LOOPS["spread"] = Loop(train_pair, plain_pair, 7, 7)
CURVES = 6


def fit_curves(session: spottrain.Session | None, after_step: Callable[[], None]) -> Mapping[str, Any]:
    """L-BFGS, which computes the loss of all data several times a step."""
    torch.manual_seed(29)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WIDTH)).double()
    network = spread(session, model) if session is not None else model
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.5, max_iter=3)
    run = session.attach(total=TOTAL, model=network, optimizer=optimizer) if session is not None else None
    inputs, targets = (torch.stack(each[:CURVES]).double() for each in zip(*samples(), strict=True))
    for _ in range(TOTAL) if run is None else iter(lambda: run.step, TOTAL):
        own = list(range(CURVES)) if run is None else [position % CURVES for position in run.share]

        def closure(own: list[int] = own) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(network(inputs[own]), targets[own])
            if run is None or session is None:
                torch.autograd.backward(loss)
                return loss
            torch.autograd.backward(run.weigh(loss))
            mean = run.weigh(loss).detach() / session.world_size
            dist.all_reduce(mean)
            return mean

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        if run is not None:
            run.boundary()
            after_step()
    return plain_state(model=network)


LOOPS["closure"] = Loop(fit_curves, lambda: fit_curves(None, lambda: None), CURVES, CURVES)
LOOPS["epochs"] = epochs_loop(7, 20)
LOOPS["epochs with idle ranks"] = epochs_loop(2, 5)
LOOPS["mesh"] = Loop(train_on_mesh, plain_mesh, MESH_BATCH, MESH_BATCH)
LOOPS["actor and critic"] = Loop(actor_critic, lambda: actor_critic(None, lambda: None), EPISODES, EPISODES)
