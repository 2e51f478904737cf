"""Load a server of completions: mixed requests from many clients, streamed.

    python -m examples.serving.load http://127.0.0.1:8000 --requests 64 --clients 16

Prints tokens per second, the time to the first token, and how often the server said 429, after
which a client waits and tries again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import random
import statistics
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Answer:
    """What a client has received.

    Attributes:
        tokens: token ids.
        finish_reason: of the last event, or None if it left before.
        first: seconds until the first token.
        seconds: until the last.
        refusals: answers with 429 before.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    first: float = 0.0
    seconds: float = 0.0
    refusals: int = 0


def request(url: str, fields: dict[str, Any], leave_after: int | None = None) -> Answer:
    """Stream one completion.

    Args:
        url: of the server.
        fields: of the request, such as "prompt".
        leave_after: close the connection after so many tokens.

    Raises:
        RuntimeError: the server answered with an error other than 429.
    """
    answer = Answer()
    body = json.dumps({**fields, "stream": True})
    while True:
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=120)
        with contextlib.closing(connection):
            started = time.perf_counter()
            connection.request("POST", "/v1/completions", body)
            with connection.getresponse() as response:
                if response.status == 200:
                    _read(response, answer, started, leave_after)
                    return answer
                if response.status != 429:
                    raise RuntimeError(f"{response.status}: {response.read().decode()}")
        answer.refusals += 1
        time.sleep(0.1)


def _read(
    events: http.client.HTTPResponse, answer: Answer, started: float, leave_after: int | None
) -> None:
    for line in events:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        for choice in event["choices"]:
            answer.tokens += choice["token_ids"]
            answer.finish_reason = choice["finish_reason"]
        answer.first = answer.first or time.perf_counter() - started
        if leave_after is not None and len(answer.tokens) >= leave_after:
            break
    answer.seconds = time.perf_counter() - started


def mixed(count: int, words: int, longest: int, new: int) -> list[dict[str, Any]]:
    """Greedy requests with random prompts of 1 to `longest` tokens, 1 to `new` new ones each."""
    draw = random.Random(0)
    return [
        {
            "prompt": [draw.randrange(words) for _ in range(draw.randint(1, longest))],
            "max_tokens": draw.randint(1, new),
            "temperature": 0,
        }
        for _ in range(count)
    ]


def load(url: str, requests: Sequence[dict[str, Any]], clients: int) -> list[Answer]:
    """All answers, from so many clients at once."""
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda fields: request(url, fields), requests))


def main() -> None:
    """Load the server, and print what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--words", type=int, default=256, help="ids of prompts are below")
    options = parser.parse_args()
    requests = mixed(options.requests, options.words, longest=40, new=24)
    started = time.perf_counter()
    answers = load(options.url, requests, options.clients)
    seconds = time.perf_counter() - started
    tokens = sum(len(answer.tokens) for answer in answers)
    first = sorted(answer.first for answer in answers)
    print(f"{len(answers)} requests, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f}/s")
    print(f"first token: median {statistics.median(first):.2f} s, last of all {first[-1]:.2f} s")
    print(f"answers with 429: {sum(answer.refusals for answer in answers)}")


if __name__ == "__main__":
    main()
