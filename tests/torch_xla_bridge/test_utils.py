"""utils: helpers, nested data, closures, files, DLPack, checkpoints; small modules."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import jax
import pytest
import torch

import isoshard.torch_bridge as xs
import isoshard.torch_xla_bridge.torch_xla as torch_xla
from isoshard.core.errors import CopyError
from isoshard.core.runtime import metrics
from isoshard.torch_xla_bridge.torch_xla._internal import jax_workarounds
from isoshard.torch_xla_bridge.torch_xla.core import xla_model as xm
from isoshard.torch_xla_bridge.torch_xla.debug import model_comparator
from isoshard.torch_xla_bridge.torch_xla.distributed.data_parallel import Context, DataParallel
from isoshard.torch_xla_bridge.torch_xla.utils import closures, dlpack, serialization
from isoshard.torch_xla_bridge.torch_xla.utils import utils as xu
from isoshard.torch_xla_bridge.torch_xla.utils.checkpoint import checkpoint

# --- Helpers -------------------------------------------------------------------------------------


def test_generators_can_be_walked_again():
    samples = xu.SampleGenerator(data=(1, 2), sample_count=3)
    assert len(samples) == 3 and list(samples) == list(samples) == [(1, 2)] * 3
    assert samples.next() == (1, 2)
    made = xu.FnDataGenerator(lambda t: t * 2, 4, torch.ones, dims=[3, 2], count=2)
    assert len(made) == 2
    pairs = list(made)
    assert [pair[0].shape for pair in pairs] == [(4, 3, 2)] * 2
    assert all(torch.equal(target, data * 2) for data, target in pairs)
    assert xu.FnDataGenerator(abs, 5, torch.zeros).next()[0].shape == (5, 1)
    with pytest.raises(StopIteration):
        xu.SampleGenerator(0, 0).next()


def test_small_helpers(capsys, monkeypatch):
    made = []
    lazy = xu.LazyProperty(lambda: made.append(1) or 7)
    assert not made and lazy.value == lazy.value == 7 and made == [1]
    folder = xu.TmpFolder()
    path = Path(folder.name)
    assert path.is_dir()
    del folder
    assert not path.exists()
    assert xu.as_list(3) == [3] and xu.as_list((3,)) == (3,)
    assert xu.list_copy_append([1], 2) == [1, 2]
    assert xu.shape([[[1], [2]], [[3], [4]]]) == [2, 2, 1] and xu.shape(3) == []
    with pytest.raises(ValueError, match=r"no common shape: \['\[1\]', '\[2\]'\]"):
        xu.shape([[1], [1, 2]])
    xu.null_print("nothing")
    xu.eprint("error")
    monkeypatch.delenv("DEBUG", raising=False)
    assert xu.get_print_fn() is xu.null_print and xu.get_print_fn(True) is xu.eprint
    monkeypatch.setenv("DEBUG", "1")
    assert xu.get_print_fn() is xu.eprint
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "error\n")


def test_the_environment(monkeypatch):
    assert xu.getenv_as("ISOSHARD_TEST", int) is None and not xu.check_env_flag("ISOSHARD_TEST")
    for text, number, flag in (("1", True, True), ("0", False, False)):
        monkeypatch.setenv("ISOSHARD_TEST", text)
        assert xu.getenv_as("ISOSHARD_TEST", bool, not number) is number
        assert xu.check_env_flag("ISOSHARD_TEST") is flag
    monkeypatch.setenv("ISOSHARD_TEST", "true")
    assert xu.check_env_flag("ISOSHARD_TEST") and xu.getenv_as("ISOSHARD_TEST", str) == "true"


def test_timing_ports_and_threads():
    lines = []
    assert xu.timed(lambda: 7, "took ", lines.append) == 7
    with xu.TimedScope("none ", lines.append) as scope:
        scope.set_error("failed")
    assert len(lines) == 1 and lines[0].startswith("took ") and lines[0].endswith("ms")
    assert 0 <= float(lines[0][5:-2]) < 1000
    ports = xu.get_free_tcp_ports(3)
    assert len(set(ports)) == 3 and all(0 < port < 2**16 for port in ports)
    together = threading.Barrier(3, timeout=30)
    assert xu.parallel_work(3, lambda n: (together.wait(), n * n)[1], range(3)) == [0, 1, 4]
    with pytest.raises(ZeroDivisionError):
        xu.parallel_work(2, lambda n: 1 // n, [1, 0])


# --- Nested data ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    image: object
    label: int


class Wrapped(xu.DataWrapper):
    def __init__(self, tensor, note):
        self.tensor, self.note = tensor, note

    def get_tensors(self):
        return [self.tensor]

    def from_tensors(self, tensors):
        return Wrapped(tensors[0], self.note)


def test_nested_data_is_sent_and_fetched():
    t = torch.arange(3.0)
    cycle: list = [t]
    cycle.append(cycle)
    data = [
        Sample(t, 3),
        {"set": {1, 2}, "wrapped": Wrapped(t + 1, "note")},
        cycle,
        int,
        test_the_environment,
    ]
    sent = xm.send_cpu_data_to_device(data, "jax:0")
    assert sent[0].label == 3 and xm.is_xla_tensor(sent[0].image) and data[0].image is t
    assert sent[1]["set"] == {1, 2} and sent[1]["wrapped"].note == "note"
    assert sent[1]["wrapped"].tensor.tolist() == [1.0, 2.0, 3.0]
    assert sent[2][1] is sent[2] and sent[2][0] is sent[0].image
    assert sent[3:] == [int, test_the_environment]
    for method, arguments in (("get_tensors", ()), ("from_tensors", ([],))):
        with pytest.raises(NotImplementedError, match=rf"DataWrapper has no {method}\("):
            getattr(xu.DataWrapper(), method)(*arguments)


# --- Closures ------------------------------------------------------------------------------------


def test_closures_in_the_background_keep_their_order_and_do_not_block():
    handler = closures.AsyncClosureHandler()
    gate, seen = threading.Event(), []
    handler.run(lambda: (gate.wait(30), seen.append(0)))
    handler.run_all([lambda n=n: seen.append(n) for n in (1, 2)])
    assert seen == []
    gate.set()
    handler.wait()
    assert seen == [0, 1, 2]
    handler.run(lambda: seen.append(3))
    handler.wait()
    assert seen[-1] == 3
    closures.ClosureHandler().run_all([lambda: seen.append(4)])
    assert seen[-1] == 4


def test_the_error_of_a_closure_arrives_once():
    handler = closures.AsyncClosureHandler()
    handler.run(lambda: {}["lost"])
    with pytest.raises(RuntimeError, match="failed with KeyError: 'lost'") as caught:
        handler.wait()
    assert isinstance(caught.value.__cause__, KeyError)
    seen = []
    handler.run(lambda: seen.append(1))
    handler.wait()
    assert seen == [1]


def test_a_full_queue_waits_and_still_tells_of_an_error(monkeypatch):
    monkeypatch.setenv("XLA_MAX_ASYNC_QUEUE", "1")
    handler = closures.AsyncClosureHandler()
    gate = threading.Event()

    def fail():
        gate.wait(30)
        raise KeyError("late")

    handler.run(fail)
    while handler._waiting.qsize():
        time.sleep(0.001)
    handler.run(lambda: None)  # fills the queue
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(RuntimeError, match="KeyError: 'late'"):
        handler.run(lambda: None)


def test_async_step_closures_read_tensors_after_the_step():
    seen = []
    x = torch.ones(3, device="jax") * 5
    xm.add_step_closure(lambda v: seen.append((threading.get_ident(), v.sum().item())), (x,), True)
    assert not seen
    torch_xla.sync()
    from isoshard.torch_bridge.execution import closures as ours

    ours._HANDLER.wait()
    assert seen[0][1] == 15.0 and seen[0][0] != threading.get_ident()
    xm.add_step_closure(lambda: 1 // 0, run_async=True)
    torch_xla.sync()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        ours._HANDLER.wait()


# --- Serialization -------------------------------------------------------------------------------


def test_one_file_for_each_tensor(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    t = torch.arange(4.0).to("jax")
    serialization.save({"a": t, "b": [t + 1, 3], "again": t, "cpu": torch.ones(2)}, path)
    files = sorted(file.name for file in (tmp_path / "model.pt.tensors").iterdir())
    assert files == ["tensor_0.pt", "tensor_1.pt"]
    loaded = serialization.load(str(path))
    assert loaded["a"].tolist() == [0.0, 1.0, 2.0, 3.0] and loaded["a"].device.type == "cpu"
    assert loaded["b"][0].tolist() == [1.0, 2.0, 3.0, 4.0] and loaded["b"][1] == 3
    assert torch.equal(loaded["cpu"], torch.ones(2))
    serialization.save({"a": t * 2}, path)
    assert serialization.load(path)["a"].tolist() == [0.0, 2.0, 4.0, 6.0]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    serialization.save({}, tmp_path / "a.pt", global_master=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.pt", "model.pt.tensors"]


# --- DLPack --------------------------------------------------------------------------------------


def test_dlpack_shares_memory_both_ways():
    source = torch.arange(64.0)
    aligned = source.data_ptr() % 64 == 0
    assert aligned  # torch allocates so
    x = dlpack.from_dlpack(source)
    assert xm.is_xla_tensor(x) and x.tolist() == source.tolist()
    back = torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(x))
    assert back.data_ptr() == source.data_ptr()
    y = dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(16)))
    back = torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(y + x[:16]))  # not computed yet
    assert torch.equal(back, torch.ones(16) + source[:16])


def test_dlpack_refuses_what_is_no_single_buffer():
    mesh = xs.Mesh(range(8), (8,), ("x",))
    sharded = xs.mark_sharding(torch.ones(8).to("jax"), mesh, ("x",))
    with pytest.raises(BufferError, match="has 8; export its shards"):
        dlpack.to_dlpack(sharded)
    with pytest.raises(BufferError, match="requires grad"):
        dlpack.to_dlpack(torch.ones(2, device="jax", requires_grad=True))
    with pytest.raises(RuntimeError, match=r"this one is on cpu; use torch\.utils\.dlpack"):
        dlpack.to_dlpack(torch.ones(2))
    with pytest.raises(CopyError):
        dlpack.from_dlpack(torch.arange(3))  # int64 while jax_enable_x64 is off


# --- Activation checkpoints ----------------------------------------------------------------------


def test_a_checkpointed_block_trains_the_same_with_the_same_dropout():
    def gradients(call):
        torch.manual_seed(0)
        block = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        ).to("jax")
        x = torch.randn(16, 8).to("jax").requires_grad_()
        call(block, x).square().sum().backward()
        return [x.grad.cpu(), *(p.grad.cpu() for p in block.parameters())]

    plain = gradients(lambda block, x: block(x))
    for options in ({}, {"use_reentrant": False}):
        found = gradients(lambda block, x: checkpoint(block, x, **options))  # noqa: B023
        for got, want in zip(found, plain, strict=True):
            torch.testing.assert_close(got, want)


def test_what_is_computed_again_stays_behind_a_barrier(counted):
    layer = torch.nn.Linear(4, 4).to("jax")
    x = torch.randn(2, 4).to("jax").requires_grad_()
    y = checkpoint(layer.forward, x).tanh().sum()
    y.backward()
    assert x.grad is not None
    assert xm.get_stablehlo([x.grad, layer.weight.grad]).count("optimization_barrier") == 1
    assert metrics.counters()["fallbacks"] == 0


# --- data_parallel, model_comparator, jax_workarounds --------------------------------------------


def batches(*sizes):
    return [(torch.full((size, 3), float(size)), torch.zeros(size)) for size in sizes]


def loop(model, loader, device, context):
    context.getattr_or("calls", list).append(str(device))
    return [(number, tuple(x.shape), x.device, model(x).device) for number, (x, _) in loader]


def test_a_loop_on_the_device():
    linear = torch.nn.Linear(3, 1)
    parallel = DataParallel(linear)
    ((first, second),) = parallel(loop, batches(4, 2))
    assert first[:2] == (0, (4, 3)) and second[:2] == (1, (2, 3))
    assert first[2] == first[3] == torch.device("jax:0")
    assert parallel.devices == ["jax:0"] and parallel.models[0].weight.device.type == "jax"
    assert linear.weight.device.type == "cpu"  # a copy was moved
    parallel(loop, batches(1))
    assert parallel._context.calls == ["jax:0", "jax:0"]
    ((first, second),) = DataParallel(lambda: torch.nn.Linear(3, 1))(
        loop, batches(4, 4, 2, 4), fixed_batch_size=True
    )
    assert first[1] == second[1] == (4, 3)  # it ends at a batch of another size
    ((only,),) = DataParallel(torch.nn.Linear(3, 1), device_ids=[])(loop, batches(2))
    assert only == (0, (2, 3), torch.device("cpu"), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="mark_sharding"):
        DataParallel(torch.nn.Linear(3, 1), device_ids=["jax:0", "jax:1"])
    context = Context(torch.device("cpu"))
    assert context.getattr_or("rate", 3) == 3 and context.getattr_or("rate", 4) == 3
    assert context.getattr_or("seen", list) is context.seen
    assert torch_xla.xm is torch_xla.core.xla_model
    assert torch_xla._dynamo.config.skip_input_data_check is False
    jax_workarounds.jax_import_guard()
    assert jax_workarounds.requires_jax(loop) is loop and jax_workarounds.maybe_get_jax() is jax
    with jax_workarounds.jax_env_context():
        pass


@pytest.fixture
def forget():
    yield
    model_comparator.configure(None)


def run(folder, scale=1.0, extra=False):
    model_comparator.configure(folder)
    x = torch.arange(3.0, device="jax")
    assert model_comparator.save("layer", x) is x
    model_comparator.save("layer", x * scale)
    model_comparator.save(None, x, step=2)
    if extra:
        model_comparator.save("more", x)


def test_two_runs_are_compared(tmp_path, monkeypatch, forget):
    one, two, three = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    run(one)
    run(two)
    run(three, scale=1.5, extra=True)
    assert model_comparator.compare(one, two) == ""
    report = model_comparator.compare(one, three)
    assert 'Changes in saved tensor "layer" with id=1\n  [1]: 1.0 vs. 1.5\n' in report
    assert f"Mismatch: more.0 not in {one}\n" in report
    (saved,) = (one / "step-2").iterdir()
    assert saved.name.startswith("test_utils.py.l")
    assert model_comparator.tensor_file_compare(saved, one / "layer.1") == ""
    model_comparator.configure(None)  # nowhere, and by the environment
    monkeypatch.delenv("MODELCMP_SAVEDIR", raising=False)
    x = torch.ones(2)
    assert model_comparator.save("x", x) is x
    monkeypatch.setenv("MODELCMP_SAVEDIR", str(tmp_path))
    model_comparator.save("x", x)
    assert torch.equal(torch.load(tmp_path / "x.0"), x)
    a, b = torch.zeros(2, 30, dtype=torch.bfloat16), torch.ones(2, 30, dtype=torch.bfloat16)
    lines = model_comparator.compare_tensors(a, b, max_diffs=3).splitlines()
    assert lines[0] == "[0, 0]: 0.0 vs. 1.0" and lines[-1] == "... aborting after 3 differences"
    assert len(lines) == 4
    assert "different shape: [2] vs. [3]" in model_comparator.compare_tensors(a[0, :2], a[0, :3])
    assert model_comparator.compare_tensors(torch.tensor([2**60]), torch.tensor([2**60])) == ""
