"""examples/serving: a server in a process of its own, loaded over the loopback."""

import concurrent.futures
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from examples.serving import load
from examples.serving.server import byte_tokenizer, small_model

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300
OPTIONS = (
    "--devices 8 --mesh 2,4 --slots 8 --max-length 64 --buckets 16,40 --max-waiting 3 --port 0"
)


@pytest.fixture(scope="module")
def server():
    """The process and its address; ended whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.serving.server", *OPTIONS.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        yield process, re.search(r"http://\S+", line)[0]
    finally:
        process.kill()
        process.stdout.close()
        process.wait(LIMIT)


def _get(url, path):
    with urllib.request.urlopen(url + path, timeout=LIMIT) as response:
        return json.load(response)


def _post(url, **fields):
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(fields).encode())
    with urllib.request.urlopen(request, timeout=LIMIT) as response:
        return json.load(response)


def _reference(model, fields):
    ids = torch.tensor([fields["prompt"]])
    with torch.no_grad():
        for _ in range(fields["max_tokens"]):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids[0, len(fields["prompt"]) :].tolist()


def test_a_load_of_64_requests_while_clients_leave(server):
    _, url = server
    before = _get(url, "/health")["compilations"]
    requests = load.mixed(64, 256, longest=40, new=16)
    endless = {"prompt": [1], "max_tokens": 60, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(4) as leaving:
        left = [leaving.submit(load.request, url, endless, leave_after=3) for _ in range(6)]
        answers = load.load(url, requests, clients=20)
        assert all(3 <= len(answer.result().tokens) < 60 for answer in left)
    model = small_model()
    assert [answer.tokens for answer in answers] == [_reference(model, r) for r in requests]
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert sum(answer.refusals for answer in answers) > 0, "20 clients, 8 slots, 3 may wait"
    health = _get(url, "/health")
    assert (health["status"], health["running"], health["waiting"]) == ("ok", 0, 0)
    assert health["compilations"] == before


def test_texts_stop_texts_and_errors(server):
    _, url = server
    assert _get(url, "/v1/models")["data"][0]["id"] == "small"
    fields = {"temperature": 0, "max_tokens": 24}
    whole = _post(url, prompt="once upon", **fields)
    choice = whole["choices"][0]
    assert choice["text"] == byte_tokenizer().decode(choice["token_ids"])
    assert whole["usage"] == {"prompt_tokens": 9, "completion_tokens": 24, "total_tokens": 33}
    stop = choice["text"][5:7]
    both = _post(url, prompt=["once upon", [7, 7]], stop=[stop, "unheard of"], **fields)["choices"]
    assert both[0]["text"] == choice["text"][: choice["text"].find(stop)]
    assert both[0]["finish_reason"] == "stop"
    seeded = [_post(url, prompt="x", seed=5)["choices"][0]["text"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    for fields, message in (
        ({"prompt": "x", "n": 2}, "not supported: n=2"),
        ({"prompt": "x", "top_q": 2}, "unknown fields: top_q"),
        ({"prompt": [1] * 41}, "1 to 40 tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature=-1 is not 0 or more"),
        ({}, "prompt is a text"),
    ):
        with pytest.raises(urllib.error.HTTPError) as raised:
            _post(url, **fields)
        assert raised.value.code == 400
        assert message in json.load(raised.value)["error"]["message"]


def test_sigterm_finishes_what_runs(server):
    process, url = server
    fields = {"prompt": [3, 4], "max_tokens": 50, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(load.request, url, fields) for _ in range(3)]
        while _get(url, "/health")["running"] < 3 and not all(task.done() for task in running):
            pass
        process.send_signal(signal.SIGTERM)
        expected = _reference(small_model(), fields)
        assert [task.result(LIMIT).tokens for task in running] == [expected] * 3
    assert process.wait(LIMIT) == -signal.SIGTERM  # uvicorn ends by the signal that it received
