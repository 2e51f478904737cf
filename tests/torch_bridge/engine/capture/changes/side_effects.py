"""What the step itself changes or uses up: counters, caches, clocks, streams, files."""

from __future__ import annotations

import functools
import itertools
import os
import random
import tempfile
import time
from pathlib import Path

import torch

from isoshard.core.runtime.private_names import release
from tests.torch_bridge.engine.capture.changes import objects, worlds
from tests.torch_bridge.engine.capture.changes.worlds import BY_DYNAMO, table

BY_NEWER = BY_DYNAMO if release(torch.__version__) >= (2, 15) else ""
MODULES = (itertools, os, random, tempfile, time)

KNOWN = {**objects.KNOWN, **{one.__name__: one for one in MODULES}, "Path": Path}
KNOWN["BY_NEWER"] = BY_NEWER
row = functools.partial(worlds.row, known=KNOWN)
once = functools.partial(row, once=True)

table(
    r"""
a counter that the step increments | steps | a = Box(steps=0) | a.steps += 1\nreturn x * a.steps |
    a.steps = 10 | a.steps = 0 | ! state='vars(a)'
a counter that the step increments and nothing reads | calls | a = Box(calls=0) | a.calls += 1\n
    return x * 2 | a.calls = 10 | a.calls = 0 | ! state='vars(a)'
a counter in a variable of a function | count | count = 0 | count += 1\nreturn x * count | pass |
    ! state="{'count': count}", scope='function'
a counter in a variable of a module | count | count = 0 | count += 1\nreturn x * count | pass |
    ! state="{'count': count}", scope='module'
a running mean in a Python float | average | a = Box(average=1.0) |
    a.average = 0.9 * a.average + 0.1 * 3.0\nreturn x * a.average | a.average = 7.0 |
    a.average = 1.0 | ! state='vars(a)'
a list that the step appends numbers to | history | history = [] |
    history.append(float(len(history)))\nreturn x * sum(history) | history.clear() |
    ! state="{'history': list(history)}"
a list that the step appends its result to | history, outlive, lambda, mul | history = [] |
    y = x * 2\nhistory.append(y)\nreturn y + len(history) | history.clear() |
    ! state="{'length': len(history)}"
a dict that the step fills as a cache | cache | cache, a = {}, Box(warmth=2.0) |
    if 'factor' not in cache:\n\tcache['factor'] = a.warmth\nreturn x * cache['factor'] |
    a.warmth = $\ncache.clear() | ! state='dict(cache)'
a flag that the first call flips | ready | a = Box(ready=False) | if not a.ready:\n
    \ta.ready = True\n\treturn -x\nreturn x * 2 | a.ready = False | ! state='vars(a)'
a flag that every call flips | odd | a = Box(odd=False) | a.odd = not a.odd\n
    return x if a.odd else -x | pass | ! state='vars(a)'
a tensor that the step replaces | hidden, outlive |
    a = Box(hidden=torch.zeros(4, 4, device=device)) |
    a.hidden = torch.tanh(a.hidden.detach() + x.detach())\nreturn x * a.hidden |
    a.hidden = torch.ones(4, 4, device=device) | pass | ! state='vars(a)'
a tensor that the step writes to in place | hidden, outside |
    a = Box(hidden=torch.zeros(4, 4, device=device)) | with torch.no_grad():\n
    \ta.hidden.add_(x.detach())\nreturn x * a.hidden.clone() | a.hidden.fill_(3.0) | pass |
    ! state='vars(a)'
an attribute that the step sets for the caller | seen | a = Box(warmth=$, seen=0.0) |
    a.seen = a.warmth + 1\nreturn x * a.warmth | a.warmth = $ | ! state="{'seen': a.seen}"
# Clocks and streams
the clock time.perf_counter | perf_counter, time | start = time.perf_counter() |
    x + (time.perf_counter() - start) * 1e3 | pass | ! against='pattern'
the clock time.time | perf_counter, time | start = time.time() |
    x + (time.time() - start) * 1e3 | pass | ! against='pattern'
random.random | random | random.seed(3) | x * random.random() | random.seed(5) | pass
a random.Random of the step | random, rng | rng = random.Random(3) | x * rng.uniform(1, 2) |
    rng.seed(5) | pass | ! frozen=BY_DYNAMO
np.random | random | np.random.seed(3) | x * np.random.rand() | np.random.seed(5) | pass
a numpy generator | random, rng, Generator | rng = np.random.default_rng(3) |
    x * float(rng.uniform(1, 2)) | pass
the next of an iterator | batches, next, iterator |
    batches = iter([2.0, 3.0, 4.0, 5.0, 6.0, 7.0, *range(8, 40)]) | x * next(batches) | pass
itertools.count | n, next, count | n = itertools.count(1) | x * next(n) | pass
the next of a generator | stream, generator, next | def numbers():\n\tfor value in range(2, 50):\n
    \t\tyield float(value)\nstream = numbers() | x * next(stream) | pass | ! frozen=BY_NEWER
a generator that is sent to | stream, generator, send | def numbers():\n\ttotal = 0.0\n
    \twhile True:\n\t\ttotal += yield total\nstream = numbers()\nnext(stream) |
    x * stream.send(2.0) | pass
""",
    once,
)
table(
    r"""
a file | open, file, scale, read_text | path = Path(tempfile.mkdtemp()) / 'scale.txt'\n
    path.write_text('$') | x * float(path.read_text()) | path.write_text('$')
an environment variable | environ, ISOSHARD_TEST_SCALE | os.environ['ISOSHARD_TEST_SCALE'] = '$' |
    x * float(os.environ['ISOSHARD_TEST_SCALE']) | os.environ['ISOSHARD_TEST_SCALE'] = '$'
an environment variable by getenv | environ, getenv, ISOSHARD_TEST_SCALE |
    os.environ['ISOSHARD_TEST_SCALE'] = '$' | x * float(os.getenv('ISOSHARD_TEST_SCALE', '1')) |
    os.environ['ISOSHARD_TEST_SCALE'] = '$' | ! frozen=BY_DYNAMO
the directory | getcwd, directory | start, other = os.getcwd(), tempfile.mkdtemp() |
    x if os.getcwd() == start else -x | os.chdir(other) | os.chdir(start)
""",
    row,
)
