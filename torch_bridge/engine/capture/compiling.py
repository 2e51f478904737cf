"""Tell the user's code that it is being traced.

Libraries ask `torch.compiler.is_compiling()` before they look at values ("is every position
attended to?") and take another way if the answer is yes. While a step is captured it is. torch's
optimizers ask too, but mean dynamo: their arithmetic on step counts is followed by `symbolic` and
`host`, so inside `optimizer.step()` the answer stays no.

Private name used (tested with torch 2.13): `torch.compiler._is_compiling_flag`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Context in which `torch.compiler.is_compiling()` holds, except inside optimizers.

    >>> with compiling():
    ...     torch.compiler.is_compiling()
    True
    """
    before = torch.compiler._is_compiling_flag
    handles = [
        register_optimizer_step_pre_hook(lambda *_: _answer(before)),
        register_optimizer_step_post_hook(lambda *_: _answer(True)),
    ]
    _answer(True)
    try:
        yield
    finally:
        _answer(before)
        for handle in handles:
            handle.remove()


def _answer(answer: bool) -> None:
    torch.compiler._is_compiling_flag = answer
