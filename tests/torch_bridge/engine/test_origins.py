"""Operations have the path of their module and the user's lines, forward and backward."""

import collections
import gzip
import inspect
import json
import re
import sys
import threading

import jax
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.runtime import metrics
from isoshard.core.runtime.trace_scopes import scopes_of
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.engine.recording.recorder import recorder


@pytest.fixture(scope="module", autouse=True)
def _scopes_in_locations():
    """The suite has JAX leave scopes out of locations, which is faster to compile."""
    before = jax.config.jax_include_full_tracebacks_in_locations
    jax.config.update("jax_include_full_tracebacks_in_locations", True)
    yield
    jax.config.update("jax_include_full_tracebacks_in_locations", before)


SOURCE = inspect.getsourcelines(sys.modules[__name__])[0]


def line(mark, function):
    (number,) = [n for n, text in enumerate(SOURCE, 1) if text.rstrip().endswith(f"# {mark}")]
    return f"test_origins.py:{number} ({function})"


class Block(torch.nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.up, self.down, self.again = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), again

    def inner(self, x):
        return self.down(torch.tanh(self.up(x)))  # inner

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x))


class Net(torch.nn.Module):
    def __init__(self, depth=2, again=False):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(again) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def paths(text, primitive=None):
    """The modules of a program's instructions, and whether they compute gradients."""
    scopes = [scope.split("/") for scope in scopes_of(text).values()]
    return {
        "/".join(scope[1:-1]).partition("/test_origins")[0]
        for scope in scopes
        if primitive in (None, scope[-1])
    }


PRODUCTS = {f"Net/layers.{n}.{name}" for n in range(2) for name in ("up", "down")}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("way", ["lazily", "compiled", "functional"])
def test_forward_and_backward(way, again):
    xs.sync()
    net = Net(again=again).to("jax")
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.ones(4, 8, device="jax")

    def train(x):
        optimizer.zero_grad()
        if way == "functional":
            parameters = dict(net.named_parameters())
            loss = torch.func.functional_call(net, parameters, (x,)).square().mean()
        else:
            loss = net(x).square().mean()
        loss.backward()
        optimizer.step()  # adam
        return loss.detach()

    if way == "lazily":
        ran = []
        program.WATCHING.append(lambda entry, _: ran.append(entry))
        try:
            train(x)
            xs.sync()
        finally:
            program.WATCHING.pop()
        text = ran[-1].text()
    else:
        step = xs.compile(train)
        step(x)
        text = xs.program_text(step)
    products = paths(text, "dot_general")
    backward = {f"backward/{path}" for path in PRODUCTS}
    # A layer that is computed again is computed where autograd needs it, by the same modules.
    assert products == PRODUCTS | backward
    assert line("inner", "inner") in text
    assert line("adam", "train") in text


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sin(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.cosh(gradient)  # own backward


class WithOwn(torch.nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


def test_a_function_of_the_users_and_a_hook():
    net = torch.nn.Sequential(WithOwn(), torch.nn.Linear(8, 8)).to("jax")
    net[1].register_forward_hook(lambda module, args, result: torch.erf(result))  # hook
    x = torch.ones(4, 8, device="jax", requires_grad=True)

    @xs.compile
    def step(x):
        (gradient,) = torch.autograd.grad(net(x).sum(), x)
        return gradient

    step(x)
    scopes = set(scopes_of(xs.program_text(step)).values())
    (cosh,) = {scope for scope in scopes if scope.endswith("/cosh")}
    assert cosh.startswith("jit(isoshard_step)/backward/Sequential/0/")
    assert line("own backward", "backward") in cosh
    assert all("Sequential/1/" in scope for scope in scopes if line("hook", "<lambda>") in scope)


def test_a_loop_of_steps_reads_the_stack_once(monkeypatch):
    net = Net().to("jax")
    x = torch.ones(4, 8, device="jax")

    def train(rows):
        loss = net(rows).square().mean()
        loss.backward()
        return loss.detach()

    losses = []
    for _ in range(3):  # gradients are new in the first step, and added to from the second on
        losses.append(train(x))
        xs.sync()
    from isoshard.torch_bridge.engine.recording import tape

    def unexpected(log):
        raise AssertionError("the stack is read in a step that was recorded before")

    monkeypatch.setattr(tape, "origin", unexpected)
    metrics.reset()
    for _ in range(3):
        losses.append(train(x))
        assert recorder().noted is None
        xs.sync()
    assert metrics.counters().get("compilations", 0) == 0
    monkeypatch.undo()
    train(x[:2].clone())  # other shapes, so another program
    assert recorder().noted is not None
    assert {each.path for each in recorder().origins() if each is not None} >= PRODUCTS


def test_names_are_in_no_key():
    """Equal programs from other lines and modules are one program, with the first one's names."""
    first, second = torch.nn.Sequential(torch.nn.Linear(3, 5)).to("jax"), torch.nn.Linear(3, 5)
    second = torch.nn.ModuleDict({"a": second}).to("jax")["a"]
    x = torch.ones(7, 3, device="jax")
    xs.sync()
    a = first(x).tanh()
    xs.sync()
    count = metrics.counters()["compilations"]
    b = second(x).tanh()
    xs.sync()
    assert metrics.counters()["compilations"] == count
    assert a.shape == b.shape


def test_threads_have_their_own_names():
    outcomes = {}

    def run(name, size):
        net = torch.nn.Sequential(collections.OrderedDict([(name, torch.nn.Linear(size, 3))]))
        net.to("jax")(torch.ones(2, size, device="jax"))
        outcomes[name] = {each.path for each in recorder().origins() if each is not None}

    threads = [threading.Thread(target=run, args=(f"own{n}", n + 11)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, seen in outcomes.items():
        assert f"Sequential/{name}" in seen
        assert not any(other in path for path in seen for other in outcomes if other != name)


def test_nan_names_module_and_line():
    class Bad(torch.nn.Module):
        def forward(self, x):
            return torch.sqrt(x - 2)  # nan

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), Bad()).to("jax")
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.zero_()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.ones(4, 8, device="jax")

    def train(x):
        optimizer.zero_grad()
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = xs.compile(train)
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError) as caught:
            step(x)
        (note,) = caught.value.__notes__
        assert note.startswith("in the operation aten::sqrt, in Sequential/1, at ")
        assert line("nan", "forward") in note
        assert net[0].weight.abs().sum().item() == 0  # as before the call
        with pytest.raises(FloatingPointError) as caught:
            net(x).sum().item()
        assert line("nan", "forward") in "".join(caught.value.__notes__)
    finally:
        jax.config.update("jax_debug_nans", False)


def test_print(capsys):
    net = torch.nn.Linear(8, 2, bias=False).to("jax")
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

    def train(x, scale):
        optimizer.zero_grad()
        h = net(x)
        xs.print("h {} of {}", h.sum(), "net")
        h.mul_(scale)
        loss = h.sum()
        xs.print("loss {:.2f}, x {}", loss, x[0, :2])
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.nn.init.ones_(net.weight)
    x, scale = torch.ones(1, 8, device="jax"), 2.0
    train(x, scale)
    assert capsys.readouterr().out == ""
    xs.sync()
    expected = "h 16.0 of net\nloss 32.00, x tensor([1., 1.])\n"
    assert capsys.readouterr().out == expected
    torch.nn.init.ones_(net.weight)
    optimizer.zero_grad()
    xs.sync()
    step = xs.compile(train)
    step(x, scale)
    assert capsys.readouterr().out == expected
    captures = metrics.counters()["captures"]
    step(x, scale)
    assert capsys.readouterr().out == "h -16.0 of net\nloss -32.00, x tensor([1., 1.])\n"
    assert metrics.counters()["captures"] == captures
    traced = iso.jax_function(lambda v: (xs.print("v {}", v.sum()), v * 2)[1])
    with pytest.raises(xs.CaptureError, match=r"jax\.debug\.print"):
        jax.jit(traced)(jax.numpy.ones(3))
    with pytest.raises(TypeError, match="a format first"):
        xs.print(x)
    with pytest.raises(TypeError, match="tensor on cpu"):
        xs.print("{}", torch.ones(1))
    with pytest.raises(IndexError):
        xs.print("{} {}", x)

    @xs.compile
    def reading(x):
        print(x.sum())
        return x + 1

    with pytest.raises(xs.CaptureError, match=r"isoshard\.torch_bridge\.print"):
        reading(x)


def test_report():
    mesh = iso.make_mesh((8,), ("x",))
    x = iso.shard(torch.ones(16, 32), mesh, iso.P("x"))
    w = iso.shard(torch.ones(32, 64), mesh, iso.P())
    step = xs.compile(lambda x: (x @ w).sum(0))
    with pytest.raises(RuntimeError, match="not been captured"):
        xs.report(step)
    for _ in range(4):
        step(x)
    costs = xs.report(step, tokens=16)
    assert costs.devices == 8
    assert 2 * 16 * 32 * 64 <= costs.flops <= 1.1 * 2 * 16 * 32 * 64
    assert costs.seconds > 0
    assert costs.tokens_per_second == 16 / costs.seconds
    assert costs.mfu is None  # of a CPU no peak is listed
    assert costs.memory["arguments"] == (2 * 32 + 32 * 64) * 4
    assert costs.collectives == {"all_reduce": (64 * 4, 1)}
    assert xs.report(step, seconds=2.0, peak_flops=1e6).mfu == costs.flops / 2 / 8e6
    assert re.search(r"memory: temporaries +", str(costs))
    with pytest.raises(ValueError, match="tokens=0"):
        xs.report(step, tokens=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_each_layer_of_llama_is_in_a_trace(tmp_path, compiled):
    transformers = pytest.importorskip("transformers")
    mesh = iso.make_mesh((2, 4), ("data", "model"))
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    model = iso.shard(model, mesh, iso.Plan.from_hf_tp_plan(model, axis="model"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = iso.shard(torch.randint(0, 256, (8, 16)), mesh, iso.P("data"))

    def train(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # train
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = xs.compile(train) if compiled else train
    for _ in range(2):
        step(ids)
        xs.sync()
    with xs.profile(tmp_path):
        step(ids)
    (path,) = tmp_path.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if "op_name" in event.get("args", {})}
    linears = [f"self_attn.{name}_proj" for name in "qkvo"]
    linears += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    for layer in range(2):
        for name in linears:
            scope = f"LlamaForCausalLM/model.layers.{layer}.{name}/{line('train', 'train')}"
            assert any(each.startswith(scope) for each in names), scope
            assert any(each.startswith(f"backward/{scope}") for each in names), scope
