"""`scaled_dot_product_attention` of a sequence that lies on several devices."""

import textwrap

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import collectives
from isoshard import P
from tests import fresh
from tests.domain.attention.test_moves import moved

E = 8
RING = P("x", None, "y")
GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def seeded():
    GENERATOR.manual_seed(0)


def draw(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).float()


def operands(length=16, keys=None, heads=2, key_heads=None):
    key = (4, key_heads or heads, keys or length, E)
    return draw(4, heads, length, E), draw(*key), draw(*key)


def gradients(tensors, options, grad):
    """The result, and the gradients of all that require one."""
    mask = options.get("attn_mask")
    given = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    out = attend(*tensors, **options)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def run(mesh, specs, tensors, **options):
    """One captured step on the mesh, compared with CPU torch in float64; gives its program."""
    grad = torch.linspace(-1, 2, tensors[0].numel()).reshape(tensors[0].shape)
    wide = {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
            for n, x in options.items()}  # fmt: skip
    for name, x in wide.items():
        if torch.is_tensor(x):
            wide[name] = x.detach().requires_grad_(options[name].requires_grad)
    want = gradients([x.double().requires_grad_() for x in tensors], wide, grad.double())
    given = [
        iso.shard(x, mesh, spec).requires_grad_() for x, spec in zip(tensors, specs, strict=True)
    ]
    if "attn_mask" in options:
        mask = options["attn_mask"]
        options["attn_mask"] = mask.detach().to("jax").requires_grad_(mask.requires_grad)
    grad = iso.shard(grad, mesh, specs[0])
    step = xs.compile(lambda grad, *given: gradients(given, options, grad))
    for have, expected in zip(step(grad, *given), want, strict=True):
        torch.testing.assert_close(have.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    return xs.program_text(step)


CASES = {
    "plain": lambda: (operands(), {}),
    "grouped, causal, scaled, more keys": lambda: (
        operands(keys=24, heads=4, key_heads=2),
        {"enable_gqa": True, "is_causal": True, "scale": 0.3},
    ),
    "float mask with a gradient": lambda: (
        operands(),
        {"attn_mask": draw(1, 2, 16, 16).requires_grad_()},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_split_sequence_goes_round_a_ring(name, mesh):
    tensors, options = CASES[name]()
    text = run(mesh, (RING,) * 3, tensors, **options)
    found = collectives.summarize(text)
    assert "collective-permute" in found and "all-gather" not in found
    assert "all-reduce" not in found or "gradient" in name  # that of the mask is summed
    if name == "plain":
        shard_of_both = 2 * tensors[1].numel() * 4 // mesh.size
        assert moved(text) == {"collective-permute": 9 * shard_of_both}  # 3 forward, 6 backward


def test_one_query_of_each_sample_for_keys_on_all_devices(mesh):
    """Decoding from a cache that is split: results are added up, not keys gathered."""
    tensors = operands(length=1, keys=32)
    text = run(mesh, (P("x"), RING, RING), tensors)
    found = collectives.summarize(text)
    assert "all-gather" not in found and "collective-permute" not in found
    assert found["all-reduce"][1] < 8 * tensors[1].numel() * 4 // mesh.size


def test_blocks_of_unequal_sizes():
    """The same ring; results and gradients lie as the operands do, that of a mask is whole."""
    mesh = iso.make_mesh((2,), ("y",))
    tensors, mask = operands(), draw(4, 1, 16, 16).requires_grad_()
    grad = torch.linspace(-1, 2, tensors[0].numel()).reshape(tensors[0].shape)
    wide = [x.double().requires_grad_() for x in tensors]
    exact = mask.detach().double().requires_grad_()
    want = gradients(wide, {"attn_mask": exact}, grad.double())
    sizes = (None, None, (5, 11), None)
    spec = P(None, None, "y")
    given = [iso.shard(x, mesh, spec, uneven="pad", sizes=sizes) for x in (*tensors, grad)]
    given = [*(x.requires_grad_() for x in given[:3]), given[3]]
    there = {"attn_mask": mask.detach().to("jax").requires_grad_()}
    step = xs.compile(lambda *given: gradients(given[:3], there, given[3]))
    found = step(*given)
    for have, expected in zip(found, want, strict=True):
        if have.shape == grad.shape:
            assert iso.to_jax(have).sizes == sizes
        torch.testing.assert_close(have.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    found = collectives.summarize(xs.program_text(step))
    assert "collective-permute" in found
    # Rows of a mask's gradient are brought together, as the mask is whole.
    assert found["all-gather"][0] == 1


def test_whole_operands_in_a_program_with_unequal_blocks(mesh):
    """Beside an operation that is no part of it."""
    tensors = operands()
    blocks = iso.shard(draw(4, 4, 5), mesh, P(None, None, "y"), uneven="pad",
                       sizes=(None, None, (1, 0, 2, 2)))  # fmt: skip
    given = [x.to("jax") for x in tensors]
    out = attend(*given)
    beside = blocks.triu(1)
    torch.testing.assert_close(out.cpu(), attend(*tensors))
    assert torch.equal(beside.cpu(), blocks.cpu().triu(1))


PROGRAM = """
    import sys
    import isoshard as iso
    iso.simulate_devices(4)
    import jax
    jax.config.update("jax_disable_most_optimizations", True)
    import torch, isoshard.torch_bridge as xs
    from torch.nn.functional import scaled_dot_product_attention as attend
    iso.compilation_cache(sys.argv[1])
    mesh = iso.make_mesh((4,), ("x",))
    x = iso.shard(torch.linspace(-1, 1, 32).reshape(1, 1, 8, 4), mesh, iso.P(None, None, "x"))
    for scale in map(float, sys.argv[2:]):
        iso.metrics.reset()
        step = xs.compile(lambda x: attend(x, x, x, scale=scale).square().sum())
        found = step(x).item()
        counted = iso.metrics.counters()
        print(found, counted["compilations"] - counted["cache_hits"])
"""


def in_a_process(folder, *scales):
    """Result and programs that were not in the folder, for each scale."""
    done = fresh.run(textwrap.dedent(PROGRAM), [str(folder / "cache"), *scales], cwd=folder)
    assert done.returncode == 0, done.stderr
    return [(float(n), int(m)) for n, m in map(str.split, done.stdout.strip().splitlines())]


def test_a_later_process_finds_the_program_and_no_other(tmp_path):
    """The scale is told to the operator, and is nowhere else in the text of the program."""
    ((first, missed),) = in_a_process(tmp_path, "0.5")
    assert missed > 0
    (other, missed), again = in_a_process(tmp_path, "0.25", "0.5")  # at other addresses
    assert missed > 0 and other != first
    assert again == (first, 0)
