"""Completions by HTTP, in OpenAI's format: one process, one mesh, many clients.

    python -m examples.serving.server --devices 8 --mesh 2,4 --port 8000
    curl localhost:8000/v1/completions -d '{"prompt": "Once", "max_tokens": 20, "stream": true}'

Without `--model FOLDER` it serves a small model with random weights, whose tokens are bytes. The
engine decodes in a thread of its own; starlette and uvicorn do the rest. A client that goes away
cancels its request, and no other; when `--max-waiting` requests wait, the answer is 429. SIGTERM
takes no more requests and finishes those there are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import isoshard as iso
from isoshard.torch_bridge.serving import Engine, QueueFullError, SamplingParams

DEFAULTS = {"temperature": 1.0, "max_tokens": 16, "top_p": 1.0, "top_k": 0}
NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "suffix": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": None,
}
"""Fields of OpenAI's format that have no effect at these values; others are an error."""
FIELDS = {
    *DEFAULTS,
    *NEUTRAL,
    *("model", "prompt", "seed", "stop", "stop_token_ids", "stream", "stream_options", "user"),
}


class Completion:
    """One choice of an answer: a request of the engine, and its text.

    Args:
        engine: that serves it.
        tokenizer: of prompts and texts, or None.
        prompt: token ids.
        params: how tokens are chosen.
        stop: texts that end it; they are not part of it.

    Raises:
        ValueError: the engine does not accept the prompt.
        QueueFullError: too many requests wait.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: tokenizers.Tokenizer | None,
        prompt: list[int],
        params: SamplingParams,
        stop: list[str],
    ):
        """See the class."""
        loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stopped = False
        self.request = engine.add_request(
            prompt,
            params,
            on_update=lambda request: loop.call_soon_threadsafe(self._changed.set),
        )

    @property
    def finish_reason(self) -> str | None:
        """Why it has ended, by OpenAI's names."""
        return "stop" if self._stopped else self.request.finish_reason

    async def deltas(self) -> AsyncIterator[tuple[str, list[int]]]:
        """New text and token ids, as they come; text that may begin a stop text is withheld."""
        read, text, sent = 0, "", 0
        try:
            while not self._stopped:
                await self._changed.wait()
                self._changed.clear()
                finished = self.request.finish_reason is not None
                tokens = self.request.tokens[read:]
                read += len(tokens)
                if self._tokenizer is not None:
                    steps = (self._decoder.step(self._tokenizer, token) for token in tokens)
                    text += "".join(step or "" for step in steps)
                ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
                if ends:
                    text, self._stopped = text[: min(ends)], True
                withheld = 0 if finished or ends else self._withheld(text)
                upto = max(sent, len(text) - withheld)
                yield text[sent:upto], tokens
                sent = upto
                if finished:
                    return
        finally:
            self.request.cancel()  # nothing, if it has finished

    def _withheld(self, text: str) -> int:
        prefixes = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
        starts = (len(prefix) for prefix in prefixes if text.endswith(prefix))
        return max(starts, default=0)


class Application:
    """The routes of the server.

    Args:
        engine: that serves; started and closed with the application.
        tokenizer: of the model; None takes and gives token ids only.
        name: of the model.
    """

    def __init__(self, engine: Engine, tokenizer: tokenizers.Tokenizer | None, name: str):
        """See the class."""
        self._engine, self._tokenizer, self._name = engine, tokenizer, name
        self.asgi = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._engine.close, cancel=True)

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def _health(self, http: HttpRequest) -> Response:
        failed = self._engine.error
        body = {
            "status": "ok" if failed is None else f"failed: {failed}",
            "running": self._engine.running,
            "waiting": self._engine.waiting,
            "compilations": iso.metrics.counters()["compilations"],
        }
        return JSONResponse(body, status_code=200 if failed is None else 503)

    async def _completions(self, http: HttpRequest) -> Response:
        completions: list[Completion] = []
        try:
            fields = _fields(await http.body())
            params, stop = _params(fields)
            if stop and self._tokenizer is None:
                raise ValueError("stop texts need a tokenizer; send stop_token_ids")
            for prompt in _prompts(fields.get("prompt"), self._tokenizer):
                completion = Completion(self._engine, self._tokenizer, prompt, params, stop)
                completions.append(completion)
        except (ValueError, TypeError, QueueFullError, RuntimeError) as error:
            for completion in completions:
                completion.request.cancel()
            return _error(error)
        answer = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._name,
        }
        if fields.get("stream"):
            usage = bool((fields.get("stream_options") or {}).get("include_usage"))
            events = _events(answer, completions, usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return await _complete(http, answer, completions)


async def _events(
    answer: dict[str, Any], completions: list[Completion], usage: bool
) -> AsyncIterator[str]:
    """Server-sent events; ended by the client's leaving, which cancels what runs."""
    chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def follow(index: int, completion: Completion) -> None:
        async with contextlib.aclosing(completion.deltas()) as deltas:
            async for text, tokens in deltas:
                chunks.put_nowait(_choice(index, completion, text, tokens))

    async def follow_all() -> None:
        try:
            await asyncio.gather(*(follow(*numbered) for numbered in enumerate(completions)))
        finally:
            chunks.put_nowait(None)

    task = asyncio.create_task(follow_all())
    try:
        while (choice := await chunks.get()) is not None:
            yield f"data: {json.dumps({**answer, 'choices': [choice]})}\n\n"
        await task
        failed = next((c.request.error for c in completions if c.request.error), None)
        if failed is not None:
            yield f"data: {json.dumps(_error_body(failed))}\n\n"
        elif usage:
            yield f"data: {json.dumps({**answer, 'choices': [], 'usage': _usage(completions)})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        task.cancel()
        for completion in completions:
            completion.request.cancel()


async def _complete(
    http: HttpRequest, answer: dict[str, Any], completions: list[Completion]
) -> Response:
    """The whole answer; a client that leaves before cancels what runs."""

    async def all_of(completion: Completion) -> tuple[str, list[int]]:
        texts, ids = [], []
        async for text, tokens in completion.deltas():
            texts.append(text)
            ids += tokens
        return "".join(texts), ids

    async def until_it_leaves() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    results = asyncio.gather(*(all_of(completion) for completion in completions))
    leaving = asyncio.create_task(until_it_leaves())
    await asyncio.wait({results, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not results.done():
        results.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await results  # which cancels the requests
        return Response(status_code=499)  # for a log: the client is gone
    failed = next((c.request.error for c in completions if c.request.error), None)
    if failed is not None:
        return JSONResponse(_error_body(failed), status_code=500)
    choices = [
        _choice(index, completion, text, ids)
        for index, (completion, (text, ids)) in enumerate(
            zip(completions, results.result(), strict=True)
        )
    ]
    return JSONResponse({**answer, "choices": choices, "usage": _usage(completions)})


def _choice(index: int, completion: Completion, text: str, ids: list[int]) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "token_ids": ids,
        "logprobs": None,
        "finish_reason": completion.finish_reason,
    }


def _usage(completions: list[Completion]) -> dict[str, int]:
    prompt = sum(len(completion.request.prompt) for completion in completions)
    new = sum(len(completion.request.tokens) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _fields(body: bytes) -> dict[str, Any]:
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError("the body is not a JSON object")
    if unknown := sorted(fields.keys() - FIELDS):
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
    if other := [f"{k}={fields[k]!r}" for k in NEUTRAL if fields.get(k, NEUTRAL[k]) != NEUTRAL[k]]:
        raise ValueError(f"not supported: {', '.join(other)}")
    return fields


def _params(fields: dict[str, Any]) -> tuple[SamplingParams, list[str]]:
    values = {name: fields.get(name, default) for name, default in DEFAULTS.items()}
    stop = fields.get("stop") or []
    params = SamplingParams(
        **{name: DEFAULTS[name] if value is None else value for name, value in values.items()},
        seed=secrets.randbits(32) if fields.get("seed") is None else fields["seed"],
        stop_token_ids=tuple(fields.get("stop_token_ids") or ()),
    )
    return params, [stop] if isinstance(stop, str) else list(stop)


def _prompts(prompt: Any, tokenizer: tokenizers.Tokenizer | None) -> list[list[int]]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt, list) and type(prompt[0]) is int):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("prompt is a text, a list of token ids, or a list of these")
    if any(isinstance(text, str) for text in prompt) and tokenizer is None:
        raise ValueError("this server has no tokenizer; send token ids")
    return [tokenizer.encode(p).ids if isinstance(p, str) else p for p in prompt]


def _error_body(error: BaseException) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": type(error).__name__, "code": None}}


def _error(error: Exception) -> Response:
    if isinstance(error, QueueFullError):
        return JSONResponse(_error_body(error), status_code=429, headers={"Retry-After": "1"})
    status = 400 if isinstance(error, ValueError | TypeError) else 503
    return JSONResponse(_error_body(error), status_code=status)


def small_model() -> torch.nn.Module:
    """A Llama with random weights, whose tokens are bytes: for trying the server."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that it prefers some tokens
    return model


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Bytes as tokens, those that are characters of their own first."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a folder of transformers, with tokenizer.json")
    parser.add_argument("--devices", type=int, help="virtual devices on the CPU")
    parser.add_argument("--mesh", default="1,1", help="devices for slots, and for heads (1,1)")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--buckets", help="lengths of prompts, such as 32,128")
    parser.add_argument("--max-waiting", type=int, default=64)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    options = parser.parse_args()
    if options.devices:
        iso.simulate_devices(options.devices)
    if options.model is None:
        model, tokenizer = small_model(), byte_tokenizer()
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model).eval()
        tokenizer = tokenizers.Tokenizer.from_file(str(options.model / "tokenizer.json"))
    mesh = iso.make_mesh(tuple(map(int, options.mesh.split(","))), ("data", "model"))
    engine = Engine(
        iso.shard(model, mesh, iso.Plan.from_hf_tp_plan(model, axis="model")),
        slots=options.slots,
        max_length=options.max_length,
        buckets=options.buckets and tuple(map(int, options.buckets.split(","))),
        max_waiting=options.max_waiting,
    )
    engine.warm_up()
    name = "small" if options.model is None else options.model.name
    listening = socket.create_server((options.host, options.port))
    print(f"serving on http://{options.host}:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(Application(engine, tokenizer, name).asgi, log_level="warning")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
