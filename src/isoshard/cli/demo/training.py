"""Training: one plain torch loop, used both for the mesh and for the CPU.

What differs between the two is given as two functions: how a batch is placed, and how the step is
prepared (`xs.compile` for the mesh, nothing for the CPU).

>>> from . import data
>>> text = np.arange(2000, dtype=np.uint8)
>>> config = Config(layers=1, width=16, heads=2, length=8)
>>> settings = Settings(steps=3, batch=2, validation_batches=1)
>>> run = train("cpu", new_model(config), data.Corpus(text, text, 1, 1), settings, lambda *_: None)
>>> len(run.losses), 5 < run.losses[0] < 7
(3, True)
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

import isoshard as iso
import isoshard.torch_bridge as xs

from .data import Corpus
from .model import BATCH, Config, loss_of

MAX_NORM = 1.0
WARMUP = 20  # steps in which the learning rate rises
SETTLING = 2  # steps left out of tokens/s: those that compile
READ_EVERY = 10  # steps between two looks at the loss, which wait for the devices

Step = Callable[..., torch.Tensor]
Progress = Callable[[int, float, float], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long and how fast to learn.

    Attributes:
        steps: of training.
        batch: sequences in a step.
        validation_batches: of the same size, for the validation loss.
        learning_rate: at its highest.
    """

    steps: int = 300
    batch: int = 8
    validation_batches: int = 32
    learning_rate: float = 1e-3


@dataclasses.dataclass
class Run:
    """What a training run gave.

    Attributes:
        name: of the run.
        losses: training loss of each step, in nats per byte.
        startup: seconds of the first steps, compilation included.
        speed: trained tokens per second after the first steps; NaN if there were no others.
        validation: loss on the validation text.
        validation_speed: evaluated tokens per second, the first batch left out.
    """

    name: str
    losses: list[float] = dataclasses.field(default_factory=list)
    startup: float = math.nan
    speed: float = math.nan
    validation: float = math.nan
    validation_speed: float = math.nan


def new_model(config: Config) -> torch.nn.Module:
    """Make the model on the CPU, with the same initial values at every call."""
    from .model import Transformer

    torch.manual_seed(0)
    return Transformer(config)


def train(
    name: str,
    model: torch.nn.Module,
    corpus: Corpus,
    settings: Settings,
    progress: Progress,
    *,
    put: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    prepare: Callable[[Step], Step] = lambda step: step,
) -> Run:
    """Train a model, then measure it on the validation text.

    Args:
        name: of the run.
        model: on the device where it is to be trained.
        corpus: the text.
        settings: steps, batch and learning rate.
        progress: called with the step, its loss and tokens/s.
        put: brings a CPU tensor to the model's device.
        prepare: makes the step ready, for instance compiles it.

    Returns:
        Losses and speeds.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(settings.steps))

    def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.detach()

    step, run, unread = prepare(train_step), Run(name), []
    started = time.perf_counter()
    for step_index in range(settings.steps):
        batch = corpus.training_batch(step_index, batch=settings.batch, length=_length(model))
        unread.append(step(*(put(torch.from_numpy(array)) for array in batch)))
        scheduler.step()
        if (
            step_index < SETTLING
            or (step_index + 1) % READ_EVERY == 0
            or step_index + 1 == settings.steps
        ):
            run.losses += map(float, unread)
            unread.clear()
            seconds = time.perf_counter() - started
            if step_index < SETTLING:
                run.startup = seconds
            else:
                tokens = (step_index + 1 - SETTLING) * settings.batch * _length(model)
                run.speed = tokens / (seconds - run.startup)
            progress(step_index + 1, run.losses[-1], run.speed)
    validate(run, model, corpus, settings, put=put, prepare=prepare)
    return run


def validate(
    run: Run,
    model: torch.nn.Module,
    corpus: Corpus,
    settings: Settings,
    *,
    put: Callable[[torch.Tensor], torch.Tensor],
    prepare: Callable[[Step], Step],
) -> None:
    """Measure loss and speed on the validation text, into `run`."""
    no_grad_loss = torch.no_grad()(lambda tokens, targets: loss_of(model, tokens, targets))
    evaluate = prepare(no_grad_loss)

    def loss(*batch: np.ndarray) -> float:
        return float(evaluate(*(put(torch.from_numpy(array)) for array in batch)))

    run.validation, run.validation_speed = mean_and_speed(
        loss, validation_batches(corpus, settings, _length(model))
    )


def validation_batches(
    corpus: Corpus, settings: Settings, length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The validation batches, the same for every framework."""
    return corpus.validation_batches(
        settings.validation_batches, batch=settings.batch, length=length
    )


def mean_and_speed(
    loss: Callable[..., float], batches: Iterator[tuple[np.ndarray, np.ndarray]]
) -> tuple[float, float]:
    """Average a loss over batches, and time it.

    Args:
        loss: of one batch, given as arrays; returns when it is computed.
        batches: of one size.

    Returns:
        The mean, and tokens per second from the second batch on.
    """
    losses, tokens, started = [], 0, math.nan
    for batch in batches:
        losses.append(loss(*batch))
        if len(losses) == 1:
            started = time.perf_counter()
        else:
            tokens += batch[0].size
    return float(np.mean(losses)), tokens / (time.perf_counter() - started)


def on_mesh(mesh: iso.Mesh) -> dict[str, Callable]:
    """What `train` needs to train on a mesh."""
    return {"put": lambda tensor: iso.shard(tensor, mesh, BATCH), "prepare": xs.compile}


def schedule(steps: int) -> Callable[[int], float]:
    """Rise over the first steps, then fall along a cosine to a tenth."""

    def factor(step: int) -> float:
        warmup = min(WARMUP, steps)
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return factor


def _length(model: torch.nn.Module) -> int:
    return model.get_parameter("position").shape[0]
