"""Continuous batching for models of `transformers`: one decode step for all slots.

    engine = Engine(model, slots=8, max_length=2048)
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=64)) for prompt in prompts]
    while engine.step():              # a prefill for each free slot, then a token for every slot
        ...
    requests[0].tokens

Prompts are padded to the length of a bucket. There is one program for each bucket, and one that
decodes; requests come, end and are cancelled without another. In a program of several threads,
`with engine:` runs the steps in a thread of its own.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jax.sharding import PartitionSpec

from isoshard import core

from ..common import naming
from ..execution.runtime import compile as compile_step
from ..execution.runtime import sync
from .requests import QueueFullError, Request, SamplingParams
from .sampling import next_tokens
from .slot_cache import SlotCache, mesh_of, takes_logits_to_keep

_SMALLEST_BUCKET = 16


class Engine:
    """Serves a model to many requests at once.

    Args:
        model: of `transformers`, with a language head, in evaluation mode on the `jax` device; on a
            mesh after `isoshard.shard(model, mesh, plan)`.
        slots: sequences that are decoded together.
        max_length: of a sequence: prompt and new tokens.
        buckets: lengths to which prompts are padded; by default 16, 32, .. up to `max_length`.
        max_waiting: requests that may wait for a slot; None for no limit.
        spec: of the cache; see `SlotCache`.

    Attributes:
        buckets: lengths of prompts, rising.
        cache: the `SlotCache`.
        max_length: see above.

    Raises:
        DeviceError: the model is not on the `jax` device.
        ValueError: it is in training mode, `SlotCache` does not support it, or a bucket is longer
            than `max_length`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
        >>> engine = Engine(LlamaForCausalLM(config).eval().to("jax"), slots=2, max_length=16)
        >>> prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
        >>> requests = [engine.add_request(p, SamplingParams(max_tokens=4)) for p in prompts]
        >>> while engine.step():
        ...     pass
        >>> [(len(request.tokens), request.finish_reason) for request in requests]
        [(4, 'length'), (4, 'length'), (4, 'length')]
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        slots: int = 8,
        max_length: int = 2048,
        buckets: Sequence[int] | None = None,
        max_waiting: int | None = None,
        spec: Any = None,
    ):
        """See the class."""
        if model.training:
            raise ValueError("an Engine serves a model in evaluation mode: call model.eval() first")
        config: Any = model.config
        self.cache = SlotCache(model, slots, max_length, spec)
        self.max_length = max_length
        self.buckets = _buckets(buckets, max_length)
        self._vocabulary = config.get_text_config(decoder=True).vocab_size
        self._max_waiting = max_waiting
        self._mesh = mesh_of(model)
        state = _SlotState(self.cache, self._mesh)
        self._prefill, self._decode = _programs(model, self.cache, state)
        sync()
        self._waiting: deque[Request] = deque()
        self._slots: list[_Sequence | None] = [None] * slots
        self._unread: deque[tuple[torch.Tensor, list[tuple[int, _Sequence]]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._error: BaseException | None = None

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        on_update: Callable[[Request], object] | None = None,
    ) -> Request:
        """Queue a request; of any thread.

        Args:
            prompt: token ids.
            params: how tokens are chosen; by default 16 tokens, greedily.
            on_update: called with the request after each token and at its end, by the thread that
                runs the engine; it should return quickly. If it raises, that is logged, and the
                request is cancelled.

        Raises:
            ValueError: the prompt is empty, longer than the largest bucket, leaves no position for
                a new token, or has ids that the vocabulary does not have.
            QueueFullError: `max_waiting` requests wait already.
            RuntimeError: the engine was closed or has failed.
        """
        request = Request(prompt, params or SamplingParams(), on_update)
        self._check_prompt(request.prompt)
        with self._changed:
            if self._error is not None:
                raise RuntimeError(f"the engine has failed: {self._error}") from self._error
            if self._closing:
                raise RuntimeError("the engine is closed and takes no more requests")
            if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait for a slot, which is max_waiting; try "
                    "again later, or give the engine more slots"
                )
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return sum(sequence is not None for sequence in self._slots)

    @property
    def error(self) -> BaseException | None:
        """What ended the engine's thread, or None."""
        return self._error

    def step(self) -> bool:
        """Admit requests to free slots, and decode a token for every slot.

        A step starts the next program before it reads the tokens of the last one, so the device
        need not wait for the host.

        Returns:
            Whether there is more to do.

        Raises:
            RuntimeError: the engine runs in a thread of its own.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            raise RuntimeError("this engine runs in its own thread; do not call step() as well")
        self._release_cancelled()
        self._admit()
        active = [(row, entry) for row, entry in enumerate(self._slots) if entry is not None]
        if active:
            tokens = self._decode()
            self._unread.append((tokens, active))
            for row, entry in active:
                self._count(row, entry)
        while len(self._unread) > bool(active):
            self._read(*self._unread.popleft())
        return bool(self.running or self._unread or self._waiting)

    def warm_up(self) -> None:
        """Compile the program of each bucket, and the one that decodes, before requests come.

        Raises:
            RuntimeError: requests are served already.
        """
        if self.running or self._waiting or self._thread is not None:
            raise RuntimeError("warm up an engine before it has requests, or runs in a thread")
        for bucket in self.buckets:
            self._run_prefill(0, (0,), bucket, SamplingParams())
        self._decode().tolist()

    def start(self) -> None:
        """Run steps in a thread of its own, whenever there are requests; until `close`.

        Raises:
            RuntimeError: it runs already, or was closed.
        """
        with self._changed:
            if self._thread is not None or self._closing:
                raise RuntimeError("this engine runs already, or was closed")
            self._thread = threading.Thread(target=self._serve, name="isoshard-engine", daemon=True)
            self._thread.start()

    def close(self, *, cancel: bool = False) -> None:
        """Take no more requests, and return when those there are have finished.

        Args:
            cancel: cancel them first.
        """
        with self._changed:
            self._closing = True
            if cancel:
                for request in (*self._waiting, *(s.request for s in self._slots if s)):
                    request.cancel()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        elif self._error is None:
            while self.step():
                pass

    def __enter__(self) -> Engine:
        """Start the thread."""
        self.start()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Close it; after an error, cancel what runs."""
        self.close(cancel=kind is not None)

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._waiting or self.running or self._unread or self._closing):
                        self._changed.wait()
                if not self.step() and self._closing:
                    return
        except BaseException as error:  # its requests' owners wait in other threads
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            requests = [*self._waiting, *(s.request for s in self._slots if s)]
            requests += [entry.request for _, active in self._unread for _, entry in active]
            self._waiting.clear()
            self._unread.clear()
            self._slots = [None] * len(self._slots)
        for request in requests:
            if request.finish_reason is None:
                request.error = error
                request.update(None, "error")

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        longest = min(self.buckets[-1], self.max_length - 1)
        if not 1 <= len(prompt) <= longest:
            raise ValueError(
                f"a prompt of this engine has 1 to {longest} tokens (max_length={self.max_length}, "
                f"buckets={self.buckets}), not {len(prompt)}"
            )
        for token in prompt:
            if not isinstance(token, int) or not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"token id {token!r} of the prompt is not an integer from 0 to "
                    f"{self._vocabulary - 1}"
                )

    def _release_cancelled(self) -> None:
        with self._changed:
            cancelled = [request for request in self._waiting if request.cancelled]
            for request in cancelled:
                self._waiting.remove(request)
        for row, entry in enumerate(self._slots):
            if entry is not None and entry.request.cancelled:
                self._slots[row] = None
                cancelled.append(entry.request)
        for request in cancelled:
            if request.finish_reason is None:
                request.update(None, "cancelled")

    def _admit(self) -> None:
        for row, entry in enumerate(self._slots):
            if entry is not None:
                continue
            with self._changed:
                if not self._waiting:
                    return
                request = self._waiting.popleft()
                entry = self._slots[row] = _Sequence(request)
            bucket = self.buckets[bisect.bisect_left(self.buckets, len(request.prompt))]
            token = self._run_prefill(row, request.prompt, bucket, request.params)
            self._unread.append((token, [(0, entry)]))
            self._count(row, entry)

    def _run_prefill(
        self, row: int, prompt: tuple[int, ...], bucket: int, params: SamplingParams
    ) -> torch.Tensor:
        return self._prefill(_upload(_packed(row, prompt, bucket, params), self._mesh))

    def _count(self, row: int, entry: _Sequence) -> None:
        """Count a token that a program was started for; the last one frees the slot."""
        entry.started += 1
        room = self.max_length - len(entry.request.prompt)
        entry.limit = min(entry.request.params.max_tokens, room)
        if entry.started >= entry.limit:
            self._slots[row] = None

    def _read(self, tokens: torch.Tensor, owners: list[tuple[int, _Sequence]]) -> None:
        values = tokens.tolist()
        for row, entry in owners:
            request = entry.request
            if request.finish_reason is not None:
                continue  # it stopped or was cancelled after this step had started
            if request.cancelled:
                request.update(None, "cancelled")
            elif values[row] in request.params.stop_token_ids:
                request.update(None, "stop")
            else:
                last = len(request.tokens) + 1 >= entry.limit
                request.update(values[row], "length" if last else None)
            if request.finish_reason is not None and entry in self._slots:
                self._slots[self._slots.index(entry)] = None


class _Sequence:
    """A request in a slot.

    Args:
        request: whose it is.
    """

    def __init__(self, request: Request):
        self.request = request
        self.started = 0
        self.limit = 0


class _SlotState:
    """What the device keeps of each slot.

    Attributes:
        integers: `[slots, 4]`, int32: the last token, its position, top-k and the seed.
        floats: `[slots, 2]`: temperature and top-p.

    Args:
        cache: whose slots they are.
        mesh: of the model, or None.
    """

    def __init__(self, cache: SlotCache, mesh: Any):
        integers = torch.zeros(cache.slots, 4, dtype=torch.int32)
        floats = torch.tensor([0.0, 1.0]).repeat(cache.slots, 1)
        spec: Any = cache.layers[0].keys.partition_spec if mesh is not None else None
        self.integers = _upload(integers, mesh, PartitionSpec(*spec[:1]) if spec else None)
        self.floats = _upload(floats, mesh)


def _upload(tensor: torch.Tensor, mesh: Any, spec: PartitionSpec | None = None) -> torch.Tensor:
    if mesh is None:
        return tensor.to(naming.current())
    return core.shard(tensor, mesh, spec or PartitionSpec())


def _packed(row: int, prompt: tuple[int, ...], bucket: int, params: SamplingParams) -> torch.Tensor:
    """All that a prefill reads, `[6 + bucket]`, in one transfer to the devices; floats as bits."""
    packed = np.zeros(6 + bucket, np.int32)
    packed[:3] = len(prompt), row, params.top_k
    packed[3:4] = np.array([params.seed], np.uint32).view(np.int32)
    packed[4:6] = np.array([params.temperature, params.top_p], np.float32).view(np.int32)
    packed[6 : 6 + len(prompt)] = prompt
    return torch.from_numpy(packed)


def _programs(model: Any, cache: SlotCache, state: _SlotState) -> tuple[Any, Any]:
    """The prefill of one prompt, and the decoding of a token in each slot."""
    keeps = takes_logits_to_keep(model)
    last_position = cache.max_length - 1

    @compile_step
    def prefill(packed: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            length, row, top_k, seed = packed[:4].split(1)
            floats = packed[4:6].view(torch.float32)
            ids = packed[None, 6:]
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            options = {"logits_to_keep": length - 1} if keeps else {}
            logits = model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache.prefill(row, length),
                use_cache=True,
                **options,
            ).logits
            logits = logits[:, 0] if keeps else logits.index_select(1, length.long() - 1)[:, 0]
            token = next_tokens(logits, floats[:1], floats[1:], top_k, seed, length)
            integers = torch.cat((token, length, top_k, seed))
            state.integers.index_copy_(0, row.long(), integers[None])
            state.floats.index_copy_(0, row.long(), floats[None])
            return token

    @compile_step
    def decode() -> torch.Tensor:
        with torch.no_grad():
            last, positions, top_k, seeds = state.integers.unbind(1)
            temperature, top_p = state.floats.unbind(1)
            logits = model(
                input_ids=last[:, None],
                position_ids=positions[:, None],
                attention_mask=cache.decode_masks(positions),
                past_key_values=cache.decode(positions),
                use_cache=True,
            ).logits[:, -1]
            following = positions + 1
            tokens = next_tokens(logits, temperature, top_p, top_k, seeds, following)
            following = following.clamp(max=last_position)  # of slots without a request
            state.integers.copy_(torch.stack((tokens, following, top_k, seeds), dim=1))
            return tokens

    return prefill, decode


def _buckets(buckets: Sequence[int] | None, max_length: int) -> tuple[int, ...]:
    if buckets is None:
        sizes = []
        size = _SMALLEST_BUCKET
        while size < max_length:
            sizes.append(size)
            size *= 2
        return (*sizes, max_length)
    chosen = tuple(sorted(set(buckets)))
    if not chosen or chosen[0] < 1 or chosen[-1] > max_length:
        raise ValueError(
            f"buckets are lengths from 1 to max_length={max_length}, not {tuple(buckets)}"
        )
    return chosen
