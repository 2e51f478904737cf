"""Tell the user's code that it is being traced.

Libraries ask `torch.compiler.is_compiling()` before they look at values ("is every position
attended to?") and take another way if the answer is yes. While a step is captured it is. torch's
optimizers ask too, but mean dynamo: their arithmetic on step counts is followed by `symbolic` and
`host`, so inside `optimizer.step()` the answer stays no.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from isoshard.torch_bridge._torch_internals.traced import COMPILING


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Context in which `torch.compiler.is_compiling()` holds, except inside optimizers.

    >>> with compiling():
    ...     torch.compiler.is_compiling()
    True
    """
    before = torch.compiler.is_compiling()
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
    COMPILING.put(torch.compiler, answer)
