"""What goes into a compiled step and what comes out, and when another program is captured."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.capture.test_compile import batches, make_step, net, train


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    names: list[str]
    scale: float = 1.0
    mask: torch.Tensor | None = None


pytree.register_dataclass(Batch)


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((3,), value).to("jax")


def test_registered_dataclasses_ordered_dicts_and_named_tuples():
    Pair = collections.namedtuple("Pair", "left right")

    @xs.compile
    def step(batch: Batch, pair: Any, extra: dict[str, Any]) -> Any:
        y = batch.x * batch.scale + pair.left
        y = y if batch.mask is None else y * batch.mask
        return Batch(y, batch.names), collections.OrderedDict(sum=y + extra["b"], pair=pair)

    for value in (1.0, 2.0):
        pair = Pair(ones(value), None)
        made, rest = step(Batch(ones(value), ["a"]), pair, {"b": ones()})
        assert isinstance(made, Batch) and made.names == ["a"]
        assert made.x.tolist() == [2 * value] * 3
        assert rest["sum"].tolist() == [2 * value + 1] * 3 and rest["pair"].left is pair.left
    made, _ = step(Batch(ones(), ["a"], mask=ones(0.0)), pair, {"b": ones()})
    assert made.x.tolist() == [0.0] * 3
    assert len(step.replays) == 2


def test_a_dataclass_that_is_not_registered_is_refused_with_the_way_out():
    @dataclasses.dataclass
    class Plain:
        x: torch.Tensor

    step = xs.compile(lambda batch: batch.x * 2)
    with pytest.raises(xs.CaptureError, match=r"type Plain.*register_dataclass"):
        step(Plain(ones()))


def test_bools_none_and_strings_choose_programs():
    @xs.compile
    def step(x: torch.Tensor, double: bool, how: str | None = None, *, count: int = 1) -> Any:
        x = x * 2 if double else x
        return x + count if how == "add" else x - count

    for _ in range(2):
        assert step(ones(), True).tolist() == [1.0] * 3
        assert step(ones(), False).tolist() == [0.0] * 3
        assert step(ones(), double=False).tolist() == [0.0] * 3
        assert step(ones(), True, "add", count=3).tolist() == [5.0] * 3
        assert step(ones(), 1).tolist() == [1.0] * 3
    assert len(step.replays) == 5


def test_new_shapes_and_dtypes_are_new_programs(counted):
    step = xs.compile(lambda x: (x * 2).sum())
    for _ in range(3):
        for size in (2, 3, 5):
            assert step(torch.ones(size).to("jax")).item() == 2 * size
        assert step(torch.ones(2, dtype=torch.int32).to("jax")).dtype == torch.int64
    assert len(step.replays) == 4 and counted("compilations") == 4


def test_results_that_share_memory_share_it_again():
    @xs.compile
    def step(x: torch.Tensor) -> Any:
        y = x * 2
        return y, y[1:], y, {"column": y.view(3, 1)}

    for value in (1.0, 4.0):
        y, tail, same, rest = step(ones(value))
        assert same is y
        y.add_(1)
        assert tail.tolist() == [2 * value + 1] * 2
        tail.zero_()
        assert rest["column"].tolist() == [[2 * value + 1], [0.0], [0.0]]


def test_a_view_alone_keeps_its_shape_and_strides():
    step = xs.compile(lambda x: (x.reshape(3, 1) * torch.ones(1, 2, device="jax")).t())
    for value in (1.0, 2.0):
        y = step(ones(value))
        assert y.tolist() == [[value] * 3] * 2 and y.shape == (2, 3)


def test_views_of_arguments_and_of_parameters_are_views():
    weight = torch.nn.Parameter(ones())

    @xs.compile
    def step(x: torch.Tensor) -> Any:
        return x[1:], weight.detach()[:2], x

    for _ in range(2):
        x = ones()
        view, part, same = step(x)
        assert same is x
        x.add_(1)
        assert view.tolist() == [2.0, 2.0]
        with torch.no_grad():
            weight.mul_(2)
        assert part.tolist() == weight.tolist()[:2]


def test_a_result_that_was_there_before_is_itself():
    table = ones(3.0)
    step = xs.compile(lambda x: (x * 2, table))
    for _ in range(2):
        assert step(ones())[1] is table


def test_a_constant_made_inside_can_be_returned():
    step = xs.compile(lambda x: (x + 1, torch.tensor([1.0, 2.0]).to("jax"), torch.arange(2)))
    for _ in range(3):
        _, constant, host = step(ones())
        assert constant.tolist() == [1.0, 2.0] and host.tolist() == [0, 1]
        constant.zero_()


def test_another_tensor_put_into_a_variable_or_attribute_is_seen():
    class Holder:
        def __init__(self):
            self.table = ones()
            self.last: Any = None

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table + GLOBAL[0] + local

    local = ones(10.0)
    GLOBAL[:] = [ones(100.0)]
    holder = Holder()
    step = xs.compile(holder.step)
    assert step(ones()).tolist() == [111.0] * 3
    holder.table = ones(2.0)
    assert step(ones()).tolist() == [112.0] * 3
    GLOBAL[0] = ones(200.0)
    assert step(ones()).tolist() == [212.0] * 3
    local = ones(20.0)
    for _ in range(3):
        holder.last = step(ones())  # what the step does not read is no reason to capture
    assert holder.last.tolist() == [222.0] * 3
    assert len(step.replays) == 1


GLOBAL: list[torch.Tensor] = []


class Trainer:
    """A trainer with compiled methods."""

    def __init__(self, rate: float = 0.1):
        self.model = net().to("jax")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)

    @xs.compile
    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train."""
        return make_step(self.model, self.optimizer)(x, y)

    @xs.compile
    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).detach()


def test_a_decorated_method_has_programs_for_each_object():
    x, y = (t.to("jax") for t in batches(1)[0])
    one, two = Trainer(), Trainer(rate=0.0)
    for _ in range(3):
        a, b = one.step(x, y).item(), two.step(x, y).item()
    assert a < b
    assert one.step is one.step and one.step is not two.step
    assert len(one.step.replays) == len(two.step.replays) == 1
    torch.testing.assert_close(one.evaluate(x), one.model(x).detach())
    assert Trainer.step.__name__ == "step" and one.step.__doc__ == "Train."
    assert xs.program_text(one.step)


def test_a_copy_of_an_object_has_programs_of_its_own():
    x, y = (t.to("jax") for t in batches(1)[0])
    one = Trainer()
    one.step(x, y)
    two = copy.deepcopy(one)
    before = one.model.first.weight.tolist()
    two.step(x, y)
    assert one.model.first.weight.tolist() == before
    assert two.model.first.weight.tolist() != before


def test_an_object_with_compiled_methods_is_freed():
    one = Trainer()
    x, y = (t.to("jax") for t in batches(1)[0])
    one.step(x, y), one.step(x, y)
    found = weakref.ref(one)
    del one
    gc.collect()
    assert found() is None


def test_a_compiled_forward_of_a_module():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)

        @xs.compile
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = Model().to("jax")
    x = batches(1)[0][0].to("jax")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), model.linear(x))
    assert list(model.state_dict()) == ["linear.weight", "linear.bias"]
    copy.deepcopy(model)


def test_slots_are_refused_with_the_way_out():
    class Slotted:
        __slots__ = ()

        @xs.compile
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pytest.raises(TypeError, match=r"Slotted has __slots__.*compile\(instance.method\)"):
        Slotted().step(ones())


def test_a_parameter_group_added_later_is_trained():
    def run(device: str, compiled: bool) -> list[float]:
        model = net().to(device)
        optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
        model.last.requires_grad_(False)
        step = make_step(model, optimizer)
        step = xs.compile(step) if compiled else step
        losses = []
        for number, (x, y) in enumerate(batches(6)):
            if number == 3:
                model.last.requires_grad_(True)
                optimizer.add_param_group({"params": model.last.parameters(), "lr": 0.2})
            losses.append(step(x.to(device), y.to(device)).item())
        return losses

    np.testing.assert_allclose(run("jax", True), run("cpu", False), rtol=1e-5)


def test_batch_norm_in_training_then_evaluation():
    def run(device: str, compiled: bool) -> Any:
        model = net(norm=True).to(device)
        step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def evaluate(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(x)

        if compiled:
            step, evaluate = xs.compile(step), xs.compile(evaluate)
        seen = []
        for x, y in batches(4):
            model.train()
            step(x.to(device), y.to(device))
            model.eval()
            seen.append(evaluate(x.to(device)).cpu())
        return torch.stack(seen)

    torch.testing.assert_close(run("jax", True), run("cpu", False), rtol=1e-4, atol=1e-5)


SCHEDULERS = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "warm-up": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_outside(name):
    def run(device: str, compiled: bool) -> list[float]:
        model = net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        step = make_step(model, optimizer)
        step = xs.compile(step) if compiled else step
        losses = []
        for x, y in batches(6):
            losses.append(step(x.to(device), y.to(device)).item())
            scheduler.step(*([losses[-1]] if name == "plateau" else []))
        return losses

    np.testing.assert_allclose(run("jax", True), run("cpu", False), rtol=1e-4)


def test_dropout_without_compile_goes_on_in_the_same_stream():
    plain = train("jax", lambda p: torch.optim.SGD(p, lr=0.1), dropout=0.5, steps=3)
    after = torch.rand(4, device="jax").tolist()
    compiled = train(
        "jax", lambda p: torch.optim.SGD(p, lr=0.1), dropout=0.5, steps=3, compiled=True
    )
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5)
    assert torch.rand(4, device="jax").tolist() == after


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config)
    model = copy.deepcopy(plain).to("jax")
    forward = xs.compile(lambda **inputs: model(**inputs))
    ids = torch.randint(0, 32, (2, 8))
    with torch.no_grad():
        want = plain(input_ids=ids, labels=ids, use_cache=False)
        for _ in range(2):
            got = forward(input_ids=ids.to("jax"), labels=ids.to("jax"), use_cache=False)
    assert type(got) is type(want)
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
    torch.testing.assert_close(got.logits.cpu(), want.logits, rtol=1e-4, atol=1e-5)
    assert len(forward.replays) == 1
