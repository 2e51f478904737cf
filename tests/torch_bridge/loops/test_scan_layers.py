"""`scan_layers`: one loop gives what the layers give one after the other."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from tests.torch_bridge.loops.decoder_layers import WIDTH, batch, close, one_by_one, stack


def test_results_and_every_gradient_are_those_of_the_layers():
    plain = stack()
    layers = copy.deepcopy(plain).to("jax")
    scanned = xs.scan_layers(layers, stacked=False)
    x, mask = batch().requires_grad_(), torch.randn(6, 6).requires_grad_()
    a, b = (t.detach().to("jax").requires_grad_() for t in (x, mask))
    want = one_by_one(plain, x, mask, scale=0.5)
    got = scanned(a, b, scale=0.5)
    close(got, want)
    want.square().sum().backward(), got.square().sum().backward()
    close(a.grad, x.grad), close(b.grad, mask.grad)
    for (name, mine), theirs in zip(layers.named_parameters(), plain.parameters(), strict=True):
        close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_dropout_differs_by_layer_and_call_and_follows_the_seed():
    class Drop(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = torch.nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = self.dropout(torch.ones_like(x))
            return torch.cat([x[1:], kept[:1]])

    scanned = xs.scan_layers([Drop() for _ in range(3)])
    x = torch.zeros(3, 64, device="jax")
    torch.manual_seed(1)
    first, second = scanned(x), scanned(x)
    rows = {tuple(row) for y in (first, second) for row in y.tolist()}
    assert len(rows) == 6 and {value for row in rows for value in row} == {0.0, 2.0}
    torch.manual_seed(1)
    assert torch.equal(scanned(x).cpu(), first.cpu())
    scanned.eval()
    assert scanned(x).tolist() == [[1.0] * 64] * 3


@pytest.mark.parametrize("checkpoint", [False, True])
def test_backward_sees_the_dropout_of_forward(checkpoint):
    class Drop(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.dropout(self.weight, 0.5)

    layers = torch.nn.ModuleList(Drop() for _ in range(3)).to("jax")
    blocks = xs.scan_layers(layers, checkpoint=checkpoint)
    y = blocks(torch.zeros(64, device="jax"))
    y.sum().backward()
    grads = blocks.layers.weight.grad.cpu()
    assert set(grads.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(grads.sum(0), y.detach().cpu())
    assert not torch.equal(grads[0], grads[1])


def test_buffers_that_layers_write_to_get_their_new_values():
    def layers() -> torch.nn.Sequential:
        torch.manual_seed(0)
        one = [
            torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)) for _ in range(3)
        ]
        return torch.nn.Sequential(*one)

    plain, model = layers(), layers().to("jax")
    scanned = xs.scan_layers(model, checkpoint=True, stacked=False)
    for number in range(2):
        x = batch(number).reshape(-1, 6)
        want, got = plain(x), scanned(x.to("jax"))
        close(got, want)
        want.square().sum().backward(), got.square().sum().backward()
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4)


def test_nested_values_and_integers_go_from_layer_to_layer():
    class Count(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            return {"x": state["x"] * self.weight, "n": [state["n"][0] + 1]}

    layers = torch.nn.ModuleList(Count() for _ in range(4)).to("jax")
    state = {"x": torch.ones(3).to("jax"), "n": [torch.zeros((), dtype=torch.int64).to("jax")]}
    got = xs.scan_layers(layers, stacked=False)(state)
    assert got["n"][0].item() == 4 and got["n"][0].dtype == torch.int64
    want = torch.stack([layer.weight.detach().cpu() for layer in layers]).prod(0)
    close(got["x"], want)
    got["x"].sum().backward()
    close(layers[0].weight.grad, want / layers[0].weight.detach().cpu())


def test_frozen_parameters_get_no_gradient():
    layers = stack(3).to("jax")
    layers[1].requires_grad_(False)
    for layer in layers:
        layer.out.bias.requires_grad_(False)
    xs.scan_layers(layers, stacked=False)(batch().to("jax")).sum().backward()
    assert all(p.grad is None for p in layers[1].parameters())
    assert layers[0].out.bias.grad is None and layers[2].out.weight.grad is not None


def test_a_parameter_shared_by_all_layers_gets_the_sum():
    plain = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    for layer in plain:
        layer.weight = plain[0].weight
    model = copy.deepcopy(plain).to("jax")
    x = torch.randn(2, 4)
    one_by_one(plain, x).sum().backward()
    xs.scan_layers(model, stacked=False)(x.to("jax")).sum().backward()
    close(model[0].weight.grad, plain[0].weight.grad)


def test_on_the_cpu_the_layers_run_in_turn():
    layers = stack(3)
    scanned = xs.scan_layers(layers)
    assert torch.equal(scanned(batch()), one_by_one(layers, batch()))
    with pytest.raises(TypeError, match=r"a parameter or buffer is on cpu; move the layers"):
        scanned(batch().to("jax"))


def test_names_copies_and_checkpoints_are_those_of_the_list():
    layers = stack(2).to("jax")
    scanned = xs.scan_layers(layers, stacked=False)
    assert list(scanned.state_dict()) == list(layers.state_dict())
    x = batch().to("jax")
    want = scanned(x).detach().cpu()
    other = copy.deepcopy(scanned)
    with torch.no_grad():
        layers[0].out.weight.zero_()
    assert not torch.allclose(scanned(x).detach().cpu(), want)
    close(other(x), want)
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    scanned.load_state_dict(torch.load(file, weights_only=False))
    close(scanned(x), want)


def test_under_jax_it_is_a_scan():
    layers = stack(3).to("jax").eval()
    f = iso.jax_function(xs.scan_layers(layers))
    import jax

    x = batch()
    close(
        iso.to_torch(jax.jit(f)(f.params, iso.to_jax(x))).cpu(),
        one_by_one(copy.deepcopy(layers).to("cpu"), x),
    )
    assert "scan" in str(jax.make_jaxpr(f)(f.params, iso.to_jax(x)))


def test_a_tensor_from_elsewhere_has_a_gradient_and_a_shared_one_can_be_written_to():
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * outside + mask.add_(1)

    results = []
    for device in ("cpu", "jax"):
        outside = torch.full((4,), 2.0).to(device).requires_grad_()
        mask = torch.ones(4).to(device)
        y = xs.scan_layers([Reads(), Reads()])(torch.ones(2, 4).to(device), mask)
        y.sum().backward()
        results.append([one.detach().cpu() for one in (y, outside.grad, mask)])
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs)


def test_a_layer_may_write_to_what_it_takes():
    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    x = torch.ones(2, 4).to("jax")
    close(xs.scan_layers([Writes(), Writes()])(x), torch.full((2, 4), 4.0))
    close(x, torch.ones(2, 4))


def test_a_gradient_taken_in_a_layer_through_the_layers_before_is_refused():
    weight = torch.ones(4).to("jax").requires_grad_()

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * weight
            return y + torch.autograd.grad(y.sum(), weight, retain_graph=True)[0]

    with pytest.raises(ValueError, match=r"gradient of a tensor of shape \(4,\) from outside"):
        xs.scan_layers([Inner(), Inner()])(torch.ones(2, 4).to("jax"))


def test_buffers_that_layers_replace_are_theirs_afterwards():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.5 * self.mean + x.detach().mean(0)
            return x + self.mean

    for stacked in (False, True):
        plain = torch.nn.ModuleList(Counts() for _ in range(3))
        scanned = xs.scan_layers(copy.deepcopy(plain).to("jax"), stacked=stacked)
        for number in range(2):
            x = torch.arange(8.0).reshape(2, 4) + number
            want = x
            for layer in plain:
                want = layer(want)
            close(scanned(x.to("jax")), want)
        for name, value in plain.state_dict().items():
            close(scanned.state_dict()[name], value)


def test_what_changes_in_one_layer_is_seen():
    layers = stack(3).to("jax")
    scanned = xs.scan_layers(layers, stacked=False)
    x = batch().to("jax")
    scanned(x)
    for layer in layers:
        layer.norm.eps = 0.5
    close(scanned(x), one_by_one(layers, x).detach().cpu())
    layers[1].norm.eps = 0.25
    with pytest.raises(ValueError, match=r"norm\.eps \(0\.5 and 0\.25\)"):
        scanned(x)
    layers[1].norm.eps = 0.5
    layers[2].out.weight = layers[2].qkv.weight
    with pytest.raises(ValueError, match=r"layer 2 differs from layer 0 in: .*weight"):
        scanned(x)


# --- Refused -------------------------------------------------------------------------------------


def test_layers_that_differ_are_refused_with_every_difference():
    layers = stack(3)
    layers[2].dropout.p = 0.5
    layers[2].out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    match = r"layer 2 differs from layer 0 in: dropout\.p \(0\.0 and 0\.5\).*out\.bias.*absent"
    with pytest.raises(ValueError, match=match):
        xs.scan_layers(layers)
    with pytest.raises(ValueError, match=r"at least one layer"):
        xs.scan_layers([])
    layers = stack(2).to("jax")
    scanned = xs.scan_layers(layers, stacked=False)
    layers[1].eval()
    with pytest.raises(ValueError, match=r"layer 1 and layer 0 differ in which modules are in tr"):
        scanned(batch().to("jax"))
    layers[1].train()
    layers[0].layer_idx, layers[1].layer_idx = 0, 1
    with pytest.raises(ValueError, match=r"layer_idx \(0 and 1\).*repeat=\"auto\""):
        xs.scan_layers(layers, stacked=False)
    assert len(xs.scan_layers(layers, ignore=("layer_idx",), stacked=False)) == 2
    layers[1].out.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"out\._forward_hooks \(a hook"):
        xs.scan_layers(layers, ignore=("layer_idx",))


class Indexed(torch.nn.Module):
    """As a decoder layer of transformers: its index is for a cache."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(WIDTH, WIDTH)
        self.fc.layer_idx, self.fc.kind = index, f"kind {index}"

    def forward(self, x: torch.Tensor, cache: list[Any] | None = None, use: Any = None) -> Any:
        if cache is not None:
            x = x + cache[self.fc.layer_idx]
        if use is not None:
            use(self.fc)
        return self.fc(x).tanh()


def test_an_index_that_no_code_uses_may_differ():
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(Indexed(n) for n in range(3))
    x = torch.randn(2, WIDTH)
    expected = one_by_one(layers, x)
    scanned = xs.scan_layers(layers)
    assert torch.equal(scanned(x), expected)  # on the CPU, one after the other
    scanned = copy.deepcopy(scanned).to("jax")
    on_device = x.to("jax")
    close(scanned(on_device), expected.detach())
    close(scanned(on_device, use=lambda fc: [fc.layer_idx, fc.kind]), expected.detach())
    match = r"their code uses fc\.(layer_idx|kind), which is .*0'? in layer 0 and .*repeat=\"auto\""
    uses = [lambda fc: fc.layer_idx == 1, lambda fc: fc.layer_idx + 1, lambda fc: f"{fc.layer_idx}"]
    uses += [lambda fc: {fc.kind: 1}, lambda fc: fc.kind.upper(), lambda fc: 2 if fc.kind else 3]
    for use in uses:
        with pytest.raises(ValueError, match=match):
            scanned(on_device, use=use)
    for place, where in ((x, scanned.to("cpu")), (on_device, scanned.to("jax"))):
        with pytest.raises(ValueError, match=match):
            where(place, [1.0, 2.0, 3.0])


def test_layers_of_transformers_are_scanned():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    model = transformers.LlamaModel(config)
    x, positions = torch.randn(2, 5, 16), torch.arange(5)[None]
    rotary = model.rotary_emb(x, positions)
    expected = x
    for layer in model.layers:
        expected = layer(expected, position_embeddings=rotary)
    blocks = xs.scan_layers(model.layers).to("jax")
    found = blocks(x.to("jax"), position_embeddings=tuple(part.to("jax") for part in rotary))
    close(found, expected.detach())


def test_options_that_are_equal_but_not_the_same_differ():
    pairs = [(0.0, -0.0), (1, True), ([1.0], [True]), ({"a": 0.0}, {"a": -0.0}), ((0.0,), (-0.0,))]
    layers = [torch.nn.Linear(3, 3).to("jax") for _ in range(3)]
    x = torch.ones(2, 3, device="jax")
    scanned = None
    for one, two in pairs:
        for layer in layers:
            layer.option = one
        scanned = scanned or xs.scan_layers(layers, stacked=False)
        scanned(x)
        layers[1].option = two
        with pytest.raises(ValueError, match=r"layer 1 differs from layer 0 in: option"):
            scanned(x)
    layers[0].option = layers[1].option = layers[2].option = float("nan")
    scanned(x)


def test_a_layer_that_returns_something_else_is_refused_and_can_be_called_otherwise():
    class Pair(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), 1

    layers = torch.nn.ModuleList(Pair(4, 4) for _ in range(2)).to("jax")
    x = torch.ones(2, 4).to("jax")
    with pytest.raises(TypeError, match=r"must return what it takes.*call=lambda"):
        xs.scan_layers(layers)(x)
    scanned = xs.scan_layers(layers, call=lambda layer, x: layer(x)[0])
    close(scanned(x), layers[1](layers[0](x)[0])[0].detach().cpu())
    wider = torch.nn.ModuleList(torch.nn.Linear(4, 8) for _ in range(2)).to("jax")
    with pytest.raises(TypeError, match=r"takes \(2, 4\) torch.float32 and returns \(2, 8\)"):
        xs.scan_layers(wider)(x)


def test_gradients_of_gradients_are_refused():
    scanned = xs.scan_layers(stack(2).to("jax"))
    x = batch().to("jax").requires_grad_()
    y = scanned(x).sum()
    with pytest.raises(RuntimeError, match=r"no gradients of gradients.*one after the other"):
        torch.autograd.grad(y, x, create_graph=True)
