"""The compilation cache on disk, across processes."""

import os
import re
from concurrent import futures

import pytest

import isoshard as iso
from tests import fresh

PROGRAM = """
import sys
import isoshard as iso, isoshard.torch_bridge as xs, torch

iso.simulate_devices(4)
iso.compilation_cache(sys.argv[1])
mesh = iso.make_mesh((4,), ("data",))
torch.manual_seed(0)
plan = iso.Plan([("weight", iso.P(None, "data"))], default=iso.P())
model = iso.shard(torch.nn.Linear(8, 4), mesh, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

@xs.compile
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

x = torch.ones(4, 8).to("jax")
losses = [step(x).item() for _ in range(2)]
counted = iso.metrics.counters()
print(counted["compilations"], counted["cache_hits"], losses, flush=True)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    said = []
    for _ in range(2):
        done = fresh.run(PROGRAM, [str(tmp_path / "xla")], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip().split(" ", 2))
    (compiled, hits, first), (again, hits_again, second) = said
    assert int(compiled) >= 1 and hits == "0"
    assert second == first
    assert hits_again == again == compiled


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        iso.compilation_cache(tmp_path / "file" / "cache")


BY_DEFAULT = """
import os, sys, warnings
from pathlib import Path

os.environ["XDG_CACHE_HOME"] = sys.argv[1]
os.environ.pop("ISOSHARD_COMPILATION_CACHE", None)
import jax
import isoshard as iso, isoshard.torch_bridge as xs, torch
from isoshard.core.runtime import compilation_cache

warnings.simplefilter("error")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
{before}
results = []
for size in (2, 3, 5, 7, 11, 13):
    x = torch.arange(float(size)).to("jax")
    results.append((x.square() @ x).item())
print(results, iso.metrics.counters()["cache_hits"], jax.config.jax_compilation_cache_dir)
"""


def by_default(folder, before=""):
    """Run programs in a new process, and return what it printed: results, hits, folder."""
    done = fresh.run(BY_DEFAULT.replace("{before}", before), [str(folder)], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "cache" not in done.stderr, done.stderr
    printed = re.fullmatch(r"(\[.*\]) (\d+) (.*)\n", done.stdout)
    assert printed, done.stdout
    results, hits, used = printed.groups()
    return results, int(hits), used


def test_it_is_on_by_default(tmp_path):
    results, hits, folder = by_default(tmp_path)
    assert folder == str(tmp_path / "isoshard" / "programs") and hits == 0
    assert list((tmp_path / "isoshard" / "programs").glob("*-cache"))
    assert by_default(tmp_path) == (results, 6, folder)


@pytest.mark.parametrize(
    ("choice", "folder"),
    [
        ('os.environ["ISOSHARD_COMPILATION_CACHE"] = "0"', None),
        ('os.environ["ISOSHARD_COMPILATION_CACHE"] = sys.argv[1] + "/named"', "named"),
        ('jax.config.update("jax_enable_compilation_cache", False)', None),
        ('jax.config.update("jax_compilation_cache_dir", sys.argv[1] + "/jax")', "jax"),
        ('iso.compilation_cache(sys.argv[1] + "/iso")', "iso"),
        ('Path(sys.argv[1], "isoshard").write_text("")', None),
        ("iso.simulate_devices(4)", None),
    ],
    ids=[
        *("off", "folder", "JAX's switch", "JAX's folder", "isoshard's"),
        *("no folder can be made", "virtual devices"),
    ],
)
def test_what_the_user_chose_stays(tmp_path, choice, folder):
    _, _, used = by_default(tmp_path, choice)
    assert used == ("None" if folder is None else str(tmp_path / folder))
    assert not (tmp_path / "isoshard" / "programs").exists()


def test_virtual_devices_are_a_warning(tmp_path):
    program = BY_DEFAULT.replace(
        "{before}", "iso.simulate_devices(4); iso.compilation_cache('here')"
    )
    done = fresh.run(program, [str(tmp_path)], cwd=tmp_path)
    assert done.returncode and "UserWarning: the compilation cache" in done.stderr
    assert "JAX_ENABLE_COMPILATION_CACHE=0" in done.stderr


def test_several_processes_share_a_folder(tmp_path):
    """At once, and one of them ends in the middle of a write."""
    dies = (
        "put = jax._src.lru_cache.LRUCache.put\n"
        "def torn(self, key, value):\n"
        "    (self.path / f'{key}-cache').write_bytes(value[:100]); os._exit(0)\n"
        "jax._src.lru_cache.LRUCache.put = torn"
    )
    fresh.run(BY_DEFAULT.replace("{before}", dies), [str(tmp_path)], cwd=tmp_path)
    folder = tmp_path / "isoshard" / "programs"
    (torn,) = folder.glob("*-cache")
    os.utime(torn, (0, 0))
    folders = [tmp_path / str(n) for n in range(4)]  # where each has its program
    for each in folders:
        each.mkdir()
    shared = f'os.environ["XDG_CACHE_HOME"] = {str(tmp_path)!r}'
    with futures.ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda each: by_default(each, shared), folders))
    assert len({results for results, _, _ in runs}) == 1
    assert by_default(tmp_path) == (runs[0][0], 6, str(folder))
    assert torn.stat().st_size > 100


def test_the_users_folder_is_bounded(tmp_path):
    limit = 20_000
    by_default(tmp_path, f"compilation_cache.LIMIT = {limit}")
    entries = list((tmp_path / "isoshard" / "programs").glob("*-cache"))
    assert entries and sum(entry.stat().st_size for entry in entries) <= limit
