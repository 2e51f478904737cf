"""What goes into a compiled step and what comes out, and when another program is captured."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.capture.test_compile import batches, make_step, net


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
    weight, table = torch.nn.Parameter(ones()), ones(3.0)

    @xs.compile
    def step(x: torch.Tensor) -> Any:
        y = x * 2
        column = {"column": y.view(3, 1), "views": (x[1:], weight.detach()[:2])}
        turned = (x.reshape(3, 1) * torch.ones(1, 2, device="jax")).t()
        return (
            y,
            y[1:],
            y,
            turned,
            column,
            (x, table, torch.tensor([1.0, 2.0]).to("jax"), torch.arange(2)),
        )

    for value in (1.0, 4.0, 5.0):
        x = ones(value)
        y, tail, same, turned, rest, (given, found, constant, host) = step(x)
        assert same is y and given is x and found is table
        assert turned.tolist() == [[value] * 3] * 2 and turned.shape == (2, 3)
        y.add_(1)
        assert tail.tolist() == [2 * value + 1] * 2
        tail.zero_()
        assert rest["column"].tolist() == [[2 * value + 1], [0.0], [0.0]]
        view, part = rest["views"]
        x.add_(1)
        assert view.tolist() == [value + 1] * 2
        with torch.no_grad():
            weight.mul_(2)
        assert part.tolist() == weight.tolist()[:2]
        assert constant.tolist() == [1.0, 2.0] and host.tolist() == [0, 1]
        constant.zero_()


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
    copied = copy.deepcopy(one)
    before = one.model.first.weight.tolist()
    copied.step(x, y)
    assert one.model.first.weight.tolist() == before != copied.model.first.weight.tolist()
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


def test_objects_that_are_refused_with_the_way_out():
    @dataclasses.dataclass
    class Plain:
        x: torch.Tensor

    step = xs.compile(lambda batch: batch.x * 2)
    with pytest.raises(xs.CaptureError, match=r"type Plain.*register_dataclass"):
        step(Plain(ones()))

    class Slotted:
        __slots__ = ()

        @xs.compile
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pytest.raises(TypeError, match=r"Slotted has __slots__.*compile\(instance.method\)"):
        Slotted().step(ones())
