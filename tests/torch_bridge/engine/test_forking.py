"""Processes beside one that uses the device: a forked one keeps to CPU tensors."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

HEAD = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, Dataset
import isoshard.torch_bridge as xs


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


def train(loader):
    weight = torch.ones(3).to("jax")
    step = xs.compile(lambda x: weight.add_(x.sum(0)).sum())
    weight.tolist()
    seen = [step(batch.to("jax")).item() for batch in loader]
    assert seen == [3.0 + 6 * 1, 3.0 + 6 * (1 + 2 + 3), 3.0 + 6 * 15, 3.0 + 6 * 28], seen
    print("trained", weight.tolist())

"""


def run(code: str, folder) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(HEAD + textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(
    "options",
    [
        'multiprocessing_context="fork"',
        'multiprocessing_context="spawn"',
        'multiprocessing_context="fork", pin_memory=True',
    ],
)
def test_workers_of_a_loader_bring_batches_beside_a_step(tmp_path, options):
    done = run(
        f"""
        if __name__ == "__main__":
            torch.ones(2, device="jax").tolist()
            train(DataLoader(Rows(), batch_size=2, num_workers=2, {options}))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "trained [57.0, 57.0, 57.0]" in done.stdout


def test_a_worker_that_uses_the_device_is_told_the_way_out(tmp_path):
    done = run(
        """
        if __name__ == "__main__":
            loader = DataLoader(OnDevice(), num_workers=1, multiprocessing_context="fork")
            try:
                next(iter(loader))
            except RuntimeError as error:
                print(error)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "forked after JAX had started" in done.stdout
    assert 'multiprocessing_context="spawn"' in done.stdout


@pytest.mark.parametrize(
    "use",
    [
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
    ],
)
def test_each_use_in_a_forked_process_raises(tmp_path, use):
    done = run(
        f"""
        import isoshard
        x = torch.ones(2).to("jax")
        step = xs.compile(lambda: x.add_(1).sum())
        step().item()
        child = os.fork()
        if child == 0:
            try:
                {use}
            except RuntimeError as error:
                os._exit(3 if "forked after JAX had started" in str(error) else 4)
            os._exit(5)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3, os.waitstatus_to_exitcode(status)
        assert step().item() == 6.0 and (x + 1).tolist() == [4.0, 4.0]
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_process_forked_before_the_device_is_used_may_use_it(tmp_path):
    done = run(
        """
        child = os.fork()
        if child == 0:
            good = (torch.ones(2).to("jax") + 1).tolist() == [2.0, 2.0]
            os._exit(0 if good else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
