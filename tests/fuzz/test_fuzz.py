"""A sample of random programs, and the fuzzer itself: it finds, shrinks, and forgives rounding."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from isoshard.torch_bridge.engine.operators import dispatch
from isoshard.torch_bridge.engine.signatures import checks
from isoshard.torch_bridge.lowerings import registry
from tests import fresh
from tests.fuzz import __main__ as command
from tests.fuzz import compare, noise, refused, snippet
from tests.fuzz import search as search_module
from tests.fuzz.__main__ import main
from tests.fuzz.operations.elementwise import BINARY
from tests.fuzz.pool import Plan
from tests.fuzz.program import Fact, Line, Program, Run
from tests.fuzz.search import Fault, Search, check, run, verdict

ROOT = Path(__file__).parents[2]


def lines(*texts: str) -> Program:
    return Program(tuple(Line(text) for text in texts))


@pytest.mark.parametrize(
    ("how", "programs"),
    [({}, 12), ({"mesh": (8,)}, 6), ({"mesh": (2, 4), "uneven": True}, 6)],
    ids=str,
)
def test_random_programs_agree(how, programs):
    search = Search(2026, **how)
    for number in search.batch(range(programs)):
        fault = search.shrink(number)
        pytest.fail(f"{fault.what}\n{fault.program}")


def test_a_seed_and_a_number_name_a_program():
    assert str(Search(1).program(3)) == str(Search(1).program(3))
    assert str(Search(1).program(3)) != str(Search(2).program(3))
    assert "mark(" in "".join(str(Search(1, mesh=(8,)).program(n)) for n in range(4))
    uneven = Search(1, mesh=(4,), uneven=True)
    made = "".join(str(uneven.program(n)) for n in range(8))
    assert re.search(r"mark\(.*, \(4,\), \(.*'x'.*\), \(.*\(\d, \d, \d, \d\).*\)\)", made)


@pytest.fixture
def wrong_product(monkeypatch):
    """`*` gives one more where its result has three elements along an axis."""
    right = registry.find(torch.ops.aten.mul.Tensor)

    def wrong(a, b):
        got = right.function(a, b)
        return got + 1 if 3 in got.shape else got

    planted = dataclasses.replace(right, function=wrong)
    monkeypatch.setitem(registry._TABLE, right.name, planted)
    monkeypatch.setattr(dispatch, "_HANDLERS", {})


def test_a_wrong_lowering_is_found_and_shrunk(wrong_product, monkeypatch):
    monkeypatch.setattr(search_module, "SECONDS", 2)
    found: list[Fault] = []
    ran, differing = run(Search(5), range(3, 5), shrink=1, report=found.append)
    assert ran == 2
    assert differing == len(found) > 1
    smallest = found[0]
    assert "elements differ" in smallest.what
    assert len(smallest.program.lines) <= 4
    assert check(smallest.program)


def test_shrinking_begins_anew_for_each_program(monkeypatch):
    seen: list[str] = []

    def differs(program: Program) -> list[str]:
        seen.append(str(program))
        return ["it differs"]

    monkeypatch.setattr(search_module, "SECONDS", 1)
    monkeypatch.setattr(search_module, "check", differs)
    search = Search(3)
    for number in (0, 1):
        seen.clear()
        fault = search.shrink(number)
        assert seen[:2] == [str(search.program(number))] * 2
        assert len(set(seen)) > 2 and fault.program.lines == ()


def test_what_counts_as_a_difference(wrong_product):
    good = lines("a = torch.ones(2, 2).to(device)", "b = a * a")
    assert check(good) == []
    bad = lines("a = torch.ones(2, 3).to(device)", "b = a * a")
    assert check(bad) == [
        "b: 6 of 6 elements differ, at [0, 0] the CPU has 1.0, jax has 2.0",
    ]


def test_a_write_through_a_view_is_seen_in_its_base():
    program = lines("a = torch.zeros(2, 3).to(device)", "b = a.t()[1:]", "b.add_(1)")
    want, got = program.run("cpu"), program.run("jax")
    assert list(want.facts) == list(got.facts) == ["a", "b"]
    assert got.facts["a"].tensor.tolist() == [[0, 1, 1], [0, 1, 1]]
    assert compare.differences(program, want.facts, {"a": want.facts["a"]}) == [
        "the CPU leaves ['a', 'b'], jax leaves ['a']"
    ]


def test_dtypes_and_strides_are_compared():
    program = lines("a = torch.zeros(2, 3).to(device)")
    want = program.run("cpu").facts
    other = lines("a = torch.zeros(3, 2, dtype=torch.int32).t().to(device)").run("cpu").facts
    (said,) = compare.differences(program, want, other)
    assert "dtype torch.float32 on the CPU, torch.int32 on jax" in said
    assert "stride (3, 1) on the CPU, (1, 2) on jax" in said


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
def test_strides_that_torch_gives_in_two_ways_are_not_compared(name, dtype):
    operands = torch.ones(4, 4, dtype=dtype).t(), torch.ones(4, 4)
    strides = set()
    for device in ("cpu", "jax"):
        try:
            strides.add(getattr(torch, name)(*(x.to(device) for x in operands)).stride())
        except RuntimeError:
            return  # not of these dtypes
    line = f"a = torch.{name}(b, c)"
    assert len(strides) == 1 or refused.strides(lines(line)) == {"a"}


def test_what_one_device_refuses_the_other_refuses(monkeypatch):
    program = Program(
        (Line("a = torch.ones(2, dtype=torch.int64).to(device)"), Line("b = a.var()", RuntimeError))
    )
    assert check(program) == []
    monkeypatch.setattr(checks, "check", lambda *_: None)
    monkeypatch.setattr(dispatch, "_HANDLERS", {})
    assert check(program) == ["`b = a.var()` does not raise RuntimeError"]


def test_a_line_whose_shapes_rounding_decides_may_be_refused():
    program = lines(
        "a = torch.tensor([1.0, 3.0]).to(device)",
        "b = torch.lgamma(a)",  # of 1 it is 0, but for rounding
        "c = b.nonzero()",
        "d = c.reshape(1)",
    )
    assert noise.refuses(program, "`d = c.reshape(1)` raises RuntimeError: ..")
    assert not noise.refuses(program, "`c = b.nonzero()` raises RuntimeError: ..")
    found = program.run("cpu")
    assert verdict(program, Run(found.facts), Run({}, "`d = c.reshape(1)` raises ..")) == []
    (said,) = verdict(program, Run(found.facts), Run({}, "`a = 1` raises .."))
    assert said == "`a = 1` raises .."


def test_a_line_that_only_jax_refuses_is_a_fault():
    (said,) = check(lines("a = torch.ones(2, dtype=torch.complex32).to(device)"))
    assert "raises TypeError" in said and "complex32" in said


def test_a_program_that_cannot_be_compiled_is_a_fault(monkeypatch):
    right = registry.find(torch.ops.aten.atan.default)

    def wrong(x):
        return x[None]

    monkeypatch.setitem(registry._TABLE, right.name, dataclasses.replace(right, function=wrong))
    monkeypatch.setattr(dispatch, "_HANDLERS", {})
    (said,) = check(lines("a = torch.ones(5).to(device)", "b = torch.atan(a)"))
    assert "computing it raises TypeError: the lowering of aten.atan.default gave shape" in said


def test_rounding_is_no_difference():
    program = lines(
        'a = data(1, (4,), torch.float32, "fine").to(device)',
        "s = torch.sin(a)",
        "b = s - torch.sin(a + 1e-12)",
        "c = b.sign()",
    )
    want = program.run("cpu").facts
    rounded = program.run("cpu").facts
    rounded["b"].tensor.add_(1e-6)
    rounded["c"].tensor.fill_(1)
    assert compare.differences(program, want, rounded) == []
    rounded["b"].tensor.add_(1e-3)
    assert len(compare.differences(program, want, rounded)) == 1


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", 0), ("float32", 1)])
def test_a_gradient_through_a_coarse_dtype_is_rounded_as_coarsely(dtype, said):
    program = lines(
        "a = torch.ones(3).requires_grad_()",
        f"b = a.to(torch.{dtype})",
        "b.float().sum().backward()",
    )
    want = program.run("cpu").facts
    shown = want["a.grad"].shown
    other = want | {"a.grad": Fact(want["a.grad"].tensor * (1 + 2**-8), shown)}
    assert len(compare.differences(program, want, other)) == said
    wrong = want | {"a.grad": Fact(want["a.grad"].tensor * 1.5, shown)}
    assert len(compare.differences(program, want, wrong)) == 1


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", 0), ("float32", 1)])
def test_a_line_that_names_a_coarse_dtype_is_rounded_as_coarsely(dtype, said):
    program = lines(
        "b = data(868, (2, 2), torch.float32).to(device)",
        f"j = torch.ldexp(b, data(371, (), torch.{dtype}, 'fine').to(device))",
    )
    want = program.run("cpu").facts
    other = want | {"j": Fact(want["j"].tensor * (1 + 2.0**-9), want["j"].shown)}
    assert len(compare.differences(program, want, other)) == said
    assert check(program) == []


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_rounding_is_disturbed_in_every_dtype(dtype):
    lines = (
        Line(f"a = data(0, (5, 5), torch.{dtype}).to(device)"),
        Line("b = a.softmax(0)"),
    )
    runs = [facts["b"].tensor for facts in noise.disturbed(Program(lines))]
    assert any(not torch.equal(runs[0], run) for run in runs[1:])


def test_rounding_is_not_disturbed_by_steps_of_one_size_only():
    """A step of 2**-21 is five units in the last place of 1.253, up and down."""
    program = lines(
        "a = torch.full((4,), 1.253).to(device)",
        "b = a.view(torch.int32) % 5",
    )
    want, other = program.run("cpu").facts, program.run("cpu").facts
    other["b"].tensor[:] += 1
    assert compare.differences(program, want, other) == []


def test_signs_of_nan_and_of_some_zeros_are_forgiven():
    program = lines(
        "a = torch.tensor([-1.0, float('nan'), 2.0]).to(device)",
        "b = a.relu()",
        "c = torch.copysign(torch.ones(3).to(device), b)",
    )
    want, other = program.run("cpu").facts, program.run("cpu").facts
    other["c"].tensor[:2] *= -1
    assert compare.differences(program, want, other) == []
    other["c"].tensor[2] *= -1
    assert "1 of 3 elements differ, at [2]" in compare.differences(program, want, other)[0]


def test_a_gradient_of_hardtanh_at_nan_is_left_out():
    """Torch's own kernels differ."""
    gradients = []
    for size in (1, 16):
        x = torch.full((size,), float("nan"), requires_grad=True)
        torch.nn.functional.hardtanh(x).backward(torch.ones(size))
        gradients.append(float(x.grad[0]))
    assert gradients == [1.0, 0.0]
    made = torch.nn.functional.hardtanh(x)
    assert refused.undecided("b = F.hardtanh(a)", made)
    assert not refused.undecided("b = a + 1", made)
    assert not refused.undecided("b = F.hardtanh(a)", made.detach())


def _gradients_at_nan(function, size):
    x = torch.full((size,), float("nan"), requires_grad=True)
    made = function(x * 1)
    if not isinstance(made, torch.Tensor) or made.shape != x.shape or not made.requires_grad:
        return None
    return torch.autograd.grad(made.sum(), x, allow_unused=True)[0]


def test_gradients_at_nan_on_which_torchs_own_kernels_differ_are_left_out():
    """Every function of one tensor is asked: a vector kernel runs for 64 numbers, for 3 none."""
    made = torch.full((3,), float("nan"), requires_grad=True) * 1
    found = set()
    for module in (torch.nn.functional, torch.special):
        for name, function in list(vars(module).items()):
            if name.startswith("_") or isinstance(function, type) or not callable(function):
                continue
            try:
                few, many = _gradients_at_nan(function, 3), _gradients_at_nan(function, 64)
            except Exception:
                continue
            if few is not None and many is not None and few[0].isnan() != many[0].isnan():
                found.add(name)
                assert refused.undecided(f"b = F.{name}(a)", made), name
    assert found >= {"celu", "elu", "selu", "hardswish"}
    assert not refused.undecided("b = F.gelu(a)", made)


@pytest.mark.parametrize(("one", "differs"), [("a.max()", False), ("a[2]", True)])
def test_a_nan_gradient_of_a_maximum_may_reach_every_element(one, differs):
    program = lines(
        "a = torch.tensor([-3.0, -2.0, -1.0]).to(device).requires_grad_()",
        f"{one}.sqrt().backward()",
    )
    want, other = program.run("cpu").facts, program.run("cpu").facts
    assert want["a.grad"].tensor[:2].tolist() == [0, 0] and want["a.grad"].tensor[2].isnan()
    other["a.grad"].tensor[:] = float("nan")
    assert bool(compare.differences(program, want, other)) == differs


def test_exact_numbers_are_not_forgiven():
    program = lines("a = data(1, (4,), torch.float32).to(device)", "b = (a + 1).floor()")
    want, other = program.run("cpu").facts, program.run("cpu").facts
    other["b"].tensor[2] += 1
    assert "1 of 4 elements differ, at [2]" in compare.differences(program, want, other)[0]


@pytest.mark.parametrize(("decides", "said"), [("F.layer_norm(a, (8,))", 0), ("a * 2", 1)])
def test_a_shape_that_rounding_decides_is_no_difference(decides, said):
    program = lines(
        "a = torch.ones(2, 8).to(device)", f"b = {decides}", "c = b[b > 0]"
    )  # ones have no variance: what layer_norm makes of them is 0, or next to it
    want, other = program.run("cpu").facts, program.run("cpu").facts
    shorter = other["c"].tensor[:-1] if decides == "a * 2" else torch.ones(3)
    shown = {**other["c"].shown, "shape": tuple(shorter.shape)}
    assert len(compare.differences(program, want, other | {"c": Fact(shorter, shown)})) == said


def test_what_a_module_gives_is_rounded():
    program = lines(
        "a = torch.ones(2, 8).to(device)",
        "c = filled(nn.LayerNorm(8), 0).to(device)",
        "d = c(a)",  # its bias: ones have no variance, and halves would count as exact
    )
    runs = noise.disturbed(program)
    assert not all(torch.equal(run["d"].tensor, runs[0]["d"].tensor) for run in runs)


def test_gelu_of_the_cpu_is_rounded_where_it_is_nearly_zero():
    program = lines("a = torch.tensor([-3.0, 1.0]).to(device)", "e = F.gelu(a)", "f = e.digamma()")
    want = program.run("cpu").facts["f"].tensor
    right = torch.digamma(torch.nn.functional.gelu(torch.tensor([-3.0, 1.0]).double()))
    room = noise.allowed(want, [run["f"].tensor for run in noise.disturbed(program)])
    assert bool((noise.distance(want, right) < room).all())


@pytest.mark.parametrize(("numbers", "exact"), [("1.5, 2.25", True), ("3.859375, 2.5", False)])
def test_numbers_of_a_coarse_dtype_are_exact_where_it_is_finer_than_the_grid(numbers, exact):
    program = lines(
        f"a = torch.tensor([{numbers}]).to(torch.bfloat16).to(device)",
        "b = a[:1].float()",
    )
    runs = noise.disturbed(program)
    assert all(torch.equal(run["b"].tensor, runs[0]["b"].tensor) for run in runs) == exact


def test_distance_of_what_is_not_finite():
    inf, nan = float("inf"), float("nan")
    one, two = torch.tensor([inf, nan, inf, 1, nan]), torch.tensor([inf, nan, -inf, nan, 2])
    assert noise.distance(one, two).tolist() == [0, 0, inf, inf, inf]


def test_gradients_beyond_the_largest_numbers_are_left_out():
    program = lines("a = data(1, (2,), torch.float32).to(device).requires_grad_()")
    want = program.run("cpu").facts
    want["a.grad"], inf = want["a"], float("inf")
    for gradient, other, said in [([1e7, 1], [-inf, 1], 0), ([inf, 1], [1e7, 1], 1)]:
        given = {name: Fact(torch.tensor(gradient), {}) for name in want}
        got = {name: Fact(torch.tensor(other), {}) for name in want}
        got["a"] = given["a"]
        assert len(compare.differences(program, given, got)) == said


def test_a_gradient_at_a_pole_of_digamma_is_left_out():
    at = torch.tensor([-1.0, 2.0], requires_grad=True)
    assert refused.undecided("b = torch.digamma(a)", torch.digamma(at))
    assert not refused.undecided("b = torch.digamma(a)", torch.digamma(at[1:]))
    assert not refused.undecided("b = torch.exp(a)", torch.digamma(at))
    infinite = torch.tensor([torch.inf, 2.0], requires_grad=True)
    assert refused.undecided("b = a.prod(0)", infinite.prod(0))
    assert not refused.undecided("b = a.sum(0)", infinite.sum(0))
    at.sum().backward()
    torch.digamma(at).sum().backward()
    assert at.grad.isfinite().all()  # torch today; where it is infinite, nothing need be left out


def test_what_the_cpu_itself_rounds_away_is_rounding():
    program = lines(
        "a = data(0, (5, 7), torch.float32).to(device)",
        "a.fill_(1.5)",
        "b = F.batch_norm(a, None, None, training=True)",
    )
    want, exact = program.run("cpu").facts, program.run("cpu").facts
    exact["b"].tensor.zero_()
    assert not torch.equal(want["b"].tensor, exact["b"].tensor)
    assert not compare.differences(program, want, exact)
    exact["b"].tensor.fill_(1e-2)
    assert compare.differences(program, want, exact)


@pytest.mark.parametrize("makes", ["F.layer_norm(a, (3,))", "nn.LayerNorm(3).to(device)(a)"])
def test_a_mean_of_equal_numbers_may_be_off(makes):
    program = lines(
        'b = data(3, (2, 1), torch.float32, "fine").to(device)',
        "a = b.expand(2, 3)",
        "m = nn.LayerNorm(3).to(device)",
        "c = m(a)" if "nn." in makes else f"c = {makes}",
    )
    want, other = program.run("cpu").facts, program.run("cpu").facts
    other["c"].tensor.add_(1e-4)
    assert not compare.differences(program, want, other)
    other["c"].tensor.add_(1e-2)
    assert compare.differences(program, want, other)


def test_the_bits_of_a_nan_are_left_out():
    floats = torch.tensor([float("nan"), 1.0])
    assert refused.bits_of_nan([floats, floats.view(torch.int32)])
    assert not refused.bits_of_nan([floats, floats.clone().view(torch.int32)])
    assert not refused.bits_of_nan([torch.ones(2), torch.ones(2).view(torch.int32)])


def test_results_of_64_bits_are_compared():
    lowest = torch.iinfo(torch.int64).min
    assert not refused.unfit(torch.tensor([lowest]), 9)
    assert not refused.unfit(torch.tensor([1e9], dtype=torch.float64), 9)
    assert refused.unfit(torch.tensor([1e9]), 9)


def _backward_through_what_was_written():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.add_(1)
    y.sum().backward()


def _backward_of_a_real_number_in_complex_memory():
    real = torch.ones((), requires_grad=True)
    memory = torch.zeros(3, dtype=torch.complex64).requires_grad_() * 1
    memory[:2] = real
    memory.real.sum().backward()


@pytest.mark.parametrize("pattern", refused.BY_VALUES)
def test_every_exception_is_needed(pattern):
    """Each pattern belongs to a message that torch gives today."""
    calls = {
        "out of": lambda: torch.ones(2).index_select(0, torch.tensor([5])),
        "Zero": lambda: torch.ones(2, dtype=torch.int64) // 0,
        "not imp": lambda: torch.gcd(torch.ones(2), torch.ones(2)),
        "single": lambda: torch.ones(3).expand(2, 3).add_(1),
        "unresolved": lambda: torch.view_as_real(torch.ones(2, dtype=torch.complex64).conj()),
        "modified": _backward_through_what_was_written,
        "isFloat": _backward_of_a_real_number_in_complex_memory,
    }
    call = next(call for start, call in calls.items() if pattern.startswith(start))
    with pytest.raises((RuntimeError, IndexError)) as raised:
        call()
    assert refused.by_values(raised.value)


def test_a_report_can_be_pasted_and_run(tmp_path):
    program = Program(
        (
            Line("a = mark(data(1, (8, 2), torch.float32).to(device), (8,), ('x', None))"),
            Line("a.add_(1)"),
            Line("b = a.view(3)", RuntimeError),
        )
    )
    text = snippet.of(Fault(7, 1, program, "it differs"))
    assert "# seed 1, program 7:\n#   it differs" in text
    file = tmp_path / "program.py"
    file.write_text(text)
    done = fresh.run(file, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "jax RuntimeError" in done.stdout
    assert "sharding=P('x'" in done.stdout


def test_a_new_seed_is_one_never_used_and_given_on(monkeypatch):
    plans: list[Plan] = []
    monkeypatch.setattr(command, "fuzz", lambda plan: plans.append(plan) or 0)
    for _ in range(2):
        assert main(["--seed", "new", "--minutes", "2"]) == 0
    assert plans[0].seed != plans[1].seed
    assert {plan.minutes for plan in plans} == {2}


@pytest.mark.parametrize("number", range(3))
def test_random_layouts_of_results_agree(number):
    program = Search(2026, layouts=True).program(number)
    assert program is None or not check(program), program


def test_layouts_are_drawn_for_results_too():
    made = "".join(str(Search(1, layouts=True).program(n)) for n in range(30))
    assert re.search(r"^mark\(\w+, \(2, 2, 2\), ", made, re.MULTILINE)
    assert "order=(" in made
    assert re.search(r"\('[xyz]', '[xyz]'\)", made)
