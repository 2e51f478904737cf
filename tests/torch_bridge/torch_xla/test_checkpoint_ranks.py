"""Several processes that save together, over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from isoshard.torch_bridge.checkpoints import CheckpointManager
from isoshard.torch_bridge.checkpoints.ranks import Ranks
from tests.torch_bridge.torch_xla.checkpoint_states import restored, same, small_state

SCRIPT = """
import os, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, sys.argv[3])
import torch, torch.distributed as dist
from isoshard.torch_bridge.checkpoints import CheckpointError, CheckpointManager
from isoshard.torch_bridge.checkpoints import manager as managers
from tests.torch_bridge.torch_xla.checkpoint_states import empty_state, restored, same, small_state
from tests.torch_bridge.torch_xla.faulty_storage import FaultyLocal, Faults

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
manager = CheckpointManager(f"{folder}/run", 10, max_to_keep=2)
for step in (0, 10, 20):
    manager.save_async(step, small_state(step))     # equal in both: each value is written once
manager.save(30, small_state(30))
manager.join()
assert manager.all_steps() == [20, 30]
assert same(restored(manager, 20), small_state(20))
wrote = [n for n in os.listdir(f"{folder}/run/30") if n.startswith(f"__{rank}_")]
assert len(wrote) == 1, wrote

# the second process fails: none commits, and each hears of it
if rank == 1:
    faults = Faults(byte=100, once=True)
    manager._steps.storage = FaultyLocal(f"{folder}/run", faults)
try:
    manager.save(40, small_state(40))
    raise SystemExit("the fault went unnoticed")
except (OSError, CheckpointError) as error:
    told = str(error)
assert ("byte 100" in told) and (rank == 1 or "rank 1: Injected" in told), told
assert manager.all_steps() == [20, 30]

# SIGTERM in one is known to all
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
assert manager.should_save(41) and manager.save(41, small_state(41))
assert manager.all_steps() == [30, 41]

# a damaged file is found by whoever reads it, and told to all
dist.barrier()
if rank == 0:
    with open(f"{folder}/run/30/__1_0.distcp", "ab") as file:
        file.write(b"more")
dist.barrier()
try:
    manager.restore(30, empty_state())
    raise SystemExit("the damage went unnoticed")
except CheckpointError as error:
    assert "__1_0.distcp has" in str(error), error
dist.barrier()
manager.close()
dist.destroy_process_group()
print("well")
"""


def test_two_processes(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path, str(rank), Path.cwd()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], told
    assert all(out.endswith("well\n") for out, _ in told), told
    with CheckpointManager(tmp_path / "run", 1, chkpt_on_preemption=False) as manager:
        assert manager.all_steps() == [30, 41]
        assert same(restored(manager, 41), small_state(41))


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one(group, tmp_path):
    for given in (None, dist.group.WORLD):
        with CheckpointManager(tmp_path / "run", 1, process_group=given) as manager:
            manager.save(0, small_state(1))
            manager.save_async(1, small_state(2))
            manager.join()
            assert manager.all_steps() == [0, 1]
            assert same(restored(manager, 1), small_state(2))


def test_alone_an_error_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError):
        Ranks(None).each(lambda: 1 // 0)
    assert Ranks(None).first(lambda: torch.tensor(3)).item() == 3
