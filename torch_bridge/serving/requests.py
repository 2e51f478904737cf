"""What a client asks for, and what it has received."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence

from isoshard.core.errors import CodedError

_LOG = logging.getLogger(__name__)


class QueueFullError(CodedError, RuntimeError, code="ISO064"):
    """As many requests wait for a slot as the engine lets wait."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, by the names of OpenAI's API and vLLM.

    Args:
        max_tokens: new tokens at most.
        temperature: divides the logits; 0 takes the most probable token.
        top_p: draw from the most probable tokens that together have this probability.
        top_k: draw from so many of the most probable tokens; 0 for all.
        seed: of the draws, 0 to 2^32 - 1. A request with the same seed and prompt draws the same
            tokens, whoever else is served.
        stop_token_ids: tokens that end the request; they are not among its tokens.

    Raises:
        ValueError: a value is out of its range.

    Example:
        >>> SamplingParams(max_tokens=4, temperature=0.7, seed=3).top_p
        1.0
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the ranges."""
        wrong = [
            f"{name}={getattr(self, name)!r} is not {expected}"
            for name, valid, expected in (
                ("max_tokens", self.max_tokens >= 1, "at least 1"),
                ("temperature", 0 <= self.temperature < float("inf"), "0 or more, and finite"),
                ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
                ("top_k", 0 <= self.top_k < 2**31, "0 or more"),
                ("seed", 0 <= self.seed < 2**32, "from 0 to 2^32 - 1"),
            )
            if not valid
        ]
        if wrong:
            raise ValueError("SamplingParams: " + "; ".join(wrong))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


class Request:
    """A request that an `Engine` has accepted.

    Its fields are written by the thread that runs the engine.

    Attributes:
        prompt: token ids.
        params: how tokens are chosen.
        tokens: new token ids so far.
        finish_reason: None while it runs; "stop" (a stop token), "length" (`max_tokens`, or no
            position is left), "cancelled" or "error".
        error: what ended it, if that was an error of the engine.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_update: Callable[[Request], object] | None = None,
    ):
        """See `Engine.add_request`, which makes requests."""
        self.prompt, self.params = tuple(prompt), params
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self._on_update = on_update
        self._cancelled = False
        self._finished = threading.Event()

    def __repr__(self) -> str:
        """Its state and sizes."""
        state = self.finish_reason or "running"
        return f"Request({len(self.prompt)} prompt tokens, {len(self.tokens)} new, {state})"

    def cancel(self) -> None:
        """End it before the next step; of any thread. Other requests are not affected."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def wait(self, timeout: float | None = None) -> list[int]:
        """The tokens, once it has finished; for an engine that runs in its own thread.

        Args:
            timeout: in seconds; None waits without limit.

        Raises:
            TimeoutError: it has not finished by then.
            RuntimeError: the engine has failed, which is the cause.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self!r} has not finished in {timeout} s")
        if self.error is not None:
            raise RuntimeError(f"the engine has failed: {self.error}") from self.error
        return self.tokens

    def update(self, token: int | None, finish_reason: str | None) -> None:
        """Add a token, or end it; the engine calls it."""
        if token is not None:
            self.tokens.append(token)
        self.finish_reason = finish_reason
        if finish_reason is not None:
            self._finished.set()
        if self._on_update is not None:
            try:
                self._on_update(self)
            except Exception:  # of one client; the others are served on
                _LOG.exception("on_update of %r has raised; the request is cancelled", self)
                self.cancel()
