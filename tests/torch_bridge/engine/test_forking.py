"""Processes beside one that uses the device: a forked one keeps to CPU tensors."""

from __future__ import annotations

import json

import pytest

from tests import fresh

USES = (
    "x + 1",
    "x.tolist()",
    "x.add_(1)",
    "x[0].item()",
    'torch.ones(2).to("jax")',
    'torch.zeros(2, device="jax")',
    "step()",
    "xs.compile(lambda: x * 2)()",
    "x.cpu()",
    "isoshard.to_jax(x * 2)",
)
LOADER = {"multiprocessing_context": "fork", "num_workers": 2, "pin_memory": True}
SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, Dataset

import isoshard
import isoshard.torch_bridge as xs

FORKED = "forked after JAX had started"


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.full((3,), float(number)) * 2


class OnDevice(Rows):
    def __init__(self):
        self.scale = torch.full((3,), 2.0).to("jax") * 1
        self.scale.tolist()

    def __getitem__(self, number):
        return (self.scale * number).cpu()


def forked(use):
    # 0: the use returned; 3: it was refused in our words; 4: by another error.
    child = os.fork()
    if child == 0:
        try:
            use()
        except BaseException as error:
            os._exit(3 if FORKED in str(error) else 4)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def first_use():
    assert (torch.ones(2).to("jax") + 1).tolist() == [2.0, 2.0]


def trained(loader):
    weight = torch.ones(3).to("jax")
    step = xs.compile(lambda x: weight.add_(x.sum(0)).sum())
    weight.tolist()
    return [[step(batch.to("jax")).item() for batch in loader], weight.tolist()]


found = {"before": forked(first_use)}
x = torch.ones(2).to("jax")
step = xs.compile(lambda: x.add_(1).sum())
step().item()
uses, loader = json.loads(sys.argv[1])
found["uses"] = {use: forked(lambda: eval(use)) for use in uses}
found["after"] = [step().item(), (x + 1).tolist()]
found["trained"] = trained(DataLoader(Rows(), batch_size=2, **loader))
try:
    next(iter(DataLoader(OnDevice(), num_workers=1, multiprocessing_context="fork")))
except RuntimeError as error:
    found["worker"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a process saw in those that it started."""
    words = [json.dumps([USES, LOADER])]
    done = fresh.run(SCRIPT, words, cwd=tmp_path_factory.mktemp("forking"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_workers_of_a_loader_bring_batches_beside_a_step(found):
    losses, weight = found["trained"]
    assert losses == [3.0 + 6 * 1, 3.0 + 6 * (1 + 2 + 3), 3.0 + 6 * 15, 3.0 + 6 * 28]
    assert weight == [57.0, 57.0, 57.0]


def test_a_worker_that_uses_the_device_is_told_the_way_out(found):
    assert "forked after JAX had started" in found["worker"]
    assert 'multiprocessing_context="spawn"' in found["worker"]


def test_each_use_in_a_forked_process_raises(found):
    assert found["uses"] == dict.fromkeys(USES, 3)
    assert found["after"] == [6.0, [4.0, 4.0]]


def test_a_process_forked_before_the_device_is_used_may_use_it(found):
    assert found["before"] == 0
