"""data_parallel, model_comparator, jax_workarounds, _dynamo and `torch_xla.xm`."""

from __future__ import annotations

import pytest
import torch

from isoshard.torch_bridge import torch_xla
from isoshard.torch_bridge.torch_xla._internal import jax_workarounds
from isoshard.torch_bridge.torch_xla.debug import model_comparator
from isoshard.torch_bridge.torch_xla.distributed.data_parallel import Context, DataParallel


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


def test_a_loop_ends_at_a_batch_of_another_size():
    ((first, second),) = DataParallel(lambda: torch.nn.Linear(3, 1))(
        loop, batches(4, 4, 2, 4), fixed_batch_size=True
    )
    assert first[1] == second[1] == (4, 3)


def test_a_loop_without_a_device():
    ((only,),) = DataParallel(torch.nn.Linear(3, 1), device_ids=[])(loop, batches(2))
    assert only == (0, (2, 3), torch.device("cpu"), torch.device("cpu"))


def test_several_devices_are_refused():
    with pytest.raises(RuntimeError, match="mark_sharding"):
        DataParallel(torch.nn.Linear(3, 1), device_ids=["jax:0", "jax:1"])


def test_a_context_keeps_what_a_loop_stores():
    context = Context(torch.device("cpu"))
    assert context.getattr_or("rate", 3) == 3 and context.getattr_or("rate", 4) == 3
    assert context.getattr_or("seen", list) is context.seen


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


def test_two_runs_are_compared(tmp_path, forget):
    one, two, three = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    run(one)
    run(two)
    run(three, scale=1.5, extra=True)
    assert model_comparator.compare(one, two) == ""
    report = model_comparator.compare(one, three)
    assert 'Changes in saved tensor "layer" with id=1\n  [1]: 1.0 vs. 1.5\n' in report
    assert f"Mismatch: more.0 not in {one}\n" in report
    (saved,) = (one / "step-2").iterdir()
    assert saved.name.startswith("test_small_modules.py.l")
    line = model_comparator.tensor_file_compare(saved, one / "layer.1")
    assert line == ""


def test_saving_nowhere_and_by_the_environment(tmp_path, monkeypatch, forget):
    model_comparator.configure(None)
    monkeypatch.delenv("MODELCMP_SAVEDIR", raising=False)
    x = torch.ones(2)
    assert model_comparator.save("x", x) is x
    monkeypatch.setenv("MODELCMP_SAVEDIR", str(tmp_path))
    model_comparator.save("x", x)
    assert torch.equal(torch.load(tmp_path / "x.0"), x)


def test_differences_are_listed_up_to_a_number():
    a, b = torch.zeros(2, 30, dtype=torch.bfloat16), torch.ones(2, 30, dtype=torch.bfloat16)
    lines = model_comparator.compare_tensors(a, b, max_diffs=3).splitlines()
    assert lines[0] == "[0, 0]: 0.0 vs. 1.0" and lines[-1] == "... aborting after 3 differences"
    assert len(lines) == 4
    assert "different shape: [2] vs. [3]" in model_comparator.compare_tensors(a[0, :2], a[0, :3])
    assert model_comparator.compare_tensors(torch.tensor([2**60]), torch.tensor([2**60])) == ""


def test_jax_is_there():
    import jax

    jax_workarounds.jax_import_guard()
    assert jax_workarounds.requires_jax(loop) is loop and jax_workarounds.maybe_get_jax() is jax
    with jax_workarounds.jax_env_context():
        pass


def test_names_of_the_package():
    assert torch_xla.xm is torch_xla.core.xla_model
    assert torch_xla._dynamo.config.skip_input_data_check is False
