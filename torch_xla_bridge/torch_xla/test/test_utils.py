"""What torch_xla's example scripts import from its tests: progress lines and summaries.

import torch_xla.test.test_utils as test_utils
"""

from __future__ import annotations

import datetime
import functools
import multiprocessing
import time
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import torch

from isoshard.torch_xla_bridge.torch_xla.debug import metrics


def mp_test(func: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for methods of a `unittest.TestCase`: each runs in a process of its own.

    Args:
        func: the method.

    Returns:
        A method that returns the exit code, and fails the test if it is not 0.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> int | None:
        process = multiprocessing.get_context("fork").Process(target=func, args=args, kwargs=kwargs)
        process.start()
        process.join()
        if isinstance(args[0], unittest.TestCase):
            args[0].assertEqual(process.exitcode, 0)
        return process.exitcode

    return wrapper


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, float] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Write numbers to TensorBoard.

    Args:
        summary_writer: its writer; None writes nothing.
        global_step: the step that they belong to.
        dict_to_write: the numbers by name.
        write_xla_metrics: also every counter, and number and sum of every metric.
    """
    if summary_writer is None:
        return
    for name, value in (dict_to_write or {}).items():
        summary_writer.add_scalar(name, value, global_step)
    if not write_xla_metrics:
        return
    for name in metrics.counter_names():
        summary_writer.add_scalar(name, metrics.counter_value(name), global_step)
    for name in metrics.metric_names():
        count, total, _ = metrics.metric_data(name) or (0, 0.0, ())
        summary_writer.add_scalar(f"{name}_TotalSamples", count, global_step)
        summary_writer.add_scalar(f"{name}_Accumulator", total, global_step)
    fallbacks = sum(metrics.counter_value(op) or 0 for op in metrics.executed_fallback_ops())
    summary_writer.add_scalar("aten_ops_sum", fallbacks, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Close TensorBoard's writer.

    Args:
        summary_writer: it; None does nothing.
    """
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()


def get_summary_writer(logdir: str | None) -> Any:
    """A writer for TensorBoard.

    Args:
        logdir: the folder; None for no writer.

    Raises:
        ImportError: tensorboard is not installed.
    """
    if not logdir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=logdir)
    write_to_summary(writer, 0, {"TensorboardStartTimestamp": time.time()})
    return writer


def now(format: str = "%H:%M:%S") -> str:
    """The time of day.

    Args:
        format: as `datetime.strftime` takes it.
    """
    return datetime.datetime.now().strftime(format)


def print_training_update(
    device: str | torch.device,
    step: int,
    loss: float | torch.Tensor,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Print a line about a training step.

    Args:
        device: where it ran.
        step: its number.
        loss: its loss; a tensor is read.
        rate: examples a second, lately.
        global_rate: examples a second, since the start.
        epoch: the number of the epoch.
        summary_writer: TensorBoard's writer; the rates go there too.
    """
    _print(
        "Training",
        device,
        Epoch=epoch,
        Step=step,
        Loss=f"{float(loss):.5f}",
        Rate=f"{rate:.2f}",
        GlobalRate=f"{global_rate:.2f}",
    )
    rates = {"examples/sec": rate, "average_examples/sec": global_rate}
    write_to_summary(summary_writer, dict_to_write=rates)


def print_test_update(
    device: str | torch.device,
    accuracy: float | None,
    epoch: int | None = None,
    step: int | None = None,
) -> None:
    """Print a line about an evaluation.

    Args:
        device: where it ran.
        accuracy: in percent.
        epoch: the number of the epoch.
        step: the number of the step.
    """
    shown = None if accuracy is None else f"{accuracy:.2f}"
    _print("Test", device, Step=step, Epoch=epoch, Accuracy=shown)


def _print(title: str, device: str | torch.device, **shown: Any) -> None:
    parts = [f"{name}={value}" for name, value in shown.items() if value is not None]
    print("|", title, f"Device={device}/0", *parts, f"Time={now()}", flush=True)
