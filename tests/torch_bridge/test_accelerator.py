"""`torch.accelerator` is the `jax` device, in all that torch asks of it."""

import ast

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (registers the device)
from tests import fresh
from tests.torch_bridge.older_torch import BEFORE_2_13


@pytest.fixture(autouse=True)
def tensor():
    return torch.ones(4, 256, device="jax")


def test_which_it_is():
    asked = torch.accelerator
    assert asked.current_accelerator(check_available=True) == torch.device("jax")
    assert asked.is_available() and asked.device_count() == 1
    assert asked.current_device_index() == 0
    assert torch.get_device_module() is torch.get_device_module("jax")
    assert torch.ones(2).to(asked.current_accelerator()).device == torch.device("jax", 0)


def test_synchronize_executes_what_is_recorded(tensor):
    made = tensor + 1
    torch.accelerator.synchronize()
    torch.accelerator.synchronize("jax")
    assert made._storage.value.array is not None


def test_memory(tensor):
    torch.accelerator.synchronize()
    used = torch.accelerator.memory_allocated()
    more = torch.ones(1024, 256, device="jax")
    torch.accelerator.synchronize()
    grown = torch.accelerator.memory_allocated() - used  # what other tests left may go meanwhile
    assert grown == pytest.approx(more.nbytes, rel=0.1)
    assert torch.accelerator.max_memory_allocated() >= torch.accelerator.memory_allocated()
    stats = torch.accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.jax.memory_allocated()
    assert torch.jax.memory_stats() == stats
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free < total
    assert torch.jax.mem_get_info()[1] == total
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()
    torch.accelerator.empty_cache()
    for reset in (torch.accelerator.reset_peak_memory_stats, torch.jax.reset_peak_memory_stats):
        with pytest.warns(UserWarning, match="for the life of the process: it is not reset"):
            reset()


def test_there_is_one_device():
    torch.accelerator.set_device_index(0)
    torch.jax.set_device(0)
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="jax:0, and index 1 was requested"):
        torch.accelerator.set_device_index(1)


def test_streams_run_in_order_and_events_say_what_they_cannot(tensor):
    stream = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    with stream:
        event = stream.record_event()
    assert stream.query() and event.query()
    stream.synchronize()
    event.wait()
    with pytest.raises(RuntimeError, match="doesn't support synchronizing events"):
        event.synchronize()


def test_what_it_can_hold():
    dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float64, torch.bfloat16, torch.int64, torch.float8_e5m2} < dtypes
    assert torch.quint8 not in dtypes


def test_data_parallel_runs_the_module_itself(tensor):
    module = torch.nn.Linear(256, 2).to("jax")
    torch.testing.assert_close(torch.nn.DataParallel(module)(tensor), module(tensor))


_PROGRAM = """
import os, sys, traceback, warnings
warnings.simplefilter("ignore")
import torch

def apart(name, run):
    "Run a function in a fork, as what it changes lasts; what it returns is printed."
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            print(name, repr(run()), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)

def accelerator():
    return str(torch.accelerator.current_accelerator())

def once_used(use):
    torch.manual_seed(0)
    before = accelerator()
    use()
    return before, accelerator()

def torchs_helpers():
    xs.xla_device()
    from torch.testing._internal import common_distributed, common_fsdp
    from torch.testing._internal.distributed._tensor import common_dtensor as dtensor
    return dtensor.DEVICE_TYPE, dtensor.PG_BACKEND, common_distributed.TEST_SKIPS != {}

def groups():
    import torch.distributed as dist
    xs.xla_device()
    backend = dist.get_default_backend_for_device(torch.accelerator.current_accelerator())
    store, found = dist.HashStore(), []
    for given in (None, backend):
        one = dist.PrefixStore(str(given), store)
        dist.init_process_group(given, store=one, rank=0, world_size=1)
        total = torch.ones(2)
        dist.all_reduce(total)
        found.append((backend, str(dist.get_backend_config()), total.sum().item()))
        dist.destroy_process_group()
    return found

def beside_a_gpu():
    from isoshard.torch_bridge.device import accelerator
    calls, asked = [], torch.accelerator
    gpu = dict(
        is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 1,
        is_initialized=lambda: True, mem_get_info=lambda index: (index, 7),
        memory_stats_as_nested_dict=lambda index: {"allocated_bytes": {"all": {"current": 5}}},
        synchronize=lambda index: calls.append(("synchronize", index)),
        set_device=lambda index: calls.append(("set_device", index)),
        empty_cache=lambda: calls.append("empty_cache"),
        reset_peak_memory_stats=lambda index: calls.append(("reset", index)),
    )
    for name, answer in gpu.items():
        setattr(torch.cuda, name, answer)
    accelerator.without_ours = lambda: torch.device("cuda")

    def which():
        return str(asked.current_accelerator()), asked.device_count(), asked.current_device_index()

    before = which(), asked.get_memory_info(0), asked.memory_allocated()
    for act in (asked.synchronize, asked.empty_cache, asked.reset_peak_memory_stats):
        act()
    with asked.device_index(0):
        pass
    x = torch.ones(2, device="jax")
    return before, calls, which()

import isoshard.torch_bridge as xs
apart("made", lambda: once_used(lambda: torch.ones(2, device="jax")))
apart("moved", lambda: once_used(lambda: torch.ones(2).to("jax")))
apart("named", lambda: once_used(xs.xla_device))
apart("beside_a_gpu", beside_a_gpu)
apart("groups", groups)
if "helpers" in sys.argv:
    apart("helpers", torchs_helpers)
"""


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """What the functions of `_PROGRAM` return, each in a fork of one new process."""
    words = [] if BEFORE_2_13 else ["helpers"]  # they query `torch.jax` itself
    done = fresh.run(_PROGRAM, words, cwd=tmp_path_factory.mktemp("accelerator"))
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line[:1].islower())
    return lambda name: ast.literal_eval(found.get(name) or pytest.fail(done.stderr))


def test_it_is_the_accelerator_once_it_is_used(forks):
    without = next((kind for kind in ("cuda", "mps") if _built(kind)), None)
    for use in ("made", "moved", "named"):
        assert forks(use) == (str(without), "jax")


def _built(kind):
    """Whether torch was built for an accelerator, which need not be here."""
    module = getattr(torch.backends, kind, None)
    return module.is_built() if module is not None and hasattr(module, "is_built") else False


def test_another_accelerator_answers_until_it_is_used(forks):
    called = [("synchronize", 1), "empty_cache", ("reset", 1), ("set_device", 0), ("set_device", 1)]
    assert forks("beside_a_gpu") == ((("cuda", 2, 1), (0, 7), 5), called, ("jax", 1, 0))


@pytest.mark.skipif(BEFORE_2_13, reason="these helpers ask `torch.jax` itself")
def test_torchs_own_test_helpers_can_be_imported(forks):
    assert forks("helpers") == ("jax", "gloo", True)


def test_process_groups_are_of_gloo_on_the_cpu(forks):
    assert torch.distributed.get_default_backend_for_device("jax") == "gloo"
    assert forks("groups") == [("gloo", "cpu:gloo", 2.0), ("gloo", "cpu:gloo,cuda:gloo", 2.0)]
