"""`torch.autocast("jax")`: the lists, the regions, and training in them."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils import _pytree as pytree

from isoshard.torch_bridge._torch_internals.dispatcher import has_kernel
from isoshard.torch_bridge.overrides import autocast as lists

functional = torch.nn.functional
LOW = [torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def to_jax(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.to("jax") if isinstance(x, torch.Tensor) else x, tree)


# --- The lists -----------------------------------------------------------------------------------

LATER = set() if has_kernel("aten::rms_norm", "AutocastCUDA") else {"rms_norm"}
"""What this torch casts nowhere."""


def of_unnamed_dimensions(name: str) -> bool:
    """Overloads for named dimensions left torch with 2.13."""
    return not re.search(r"(?i)dimname|\.names_", name)


def test_what_torch_does_not_cast_is_not_cast_here():
    x = torch.ones(2, 4, dtype=torch.bfloat16, device="jax")
    with torch.autocast("jax", torch.bfloat16):
        got = functional.rms_norm(x, (4,))
    assert got.dtype == (torch.bfloat16 if LATER else torch.float32)


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("LOWER_PRECISION_FP", lists.LOWER_PRECISION),
        ("FP32", lists.FLOAT32),
        ("FP32_SET_OPT_DTYPE", lists.FLOAT32_DTYPE),
        ("PROMOTE", lists.PROMOTE),
    ],
)
def test_the_lists_are_those_that_torch_offers_every_backend(macro, ours):
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    (body,) = re.findall(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", header)
    names = [".".join(name.split(", ")) for name in re.findall(r"\b_\(([^)]*)\)", body)]
    assert sorted(set(ours) - LATER) == sorted(filter(of_unnamed_dimensions, names))
    assert len(set(ours)) == len(ours)


def test_the_overloads_that_get_a_dtype_are_those_of_torch():
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = header.partition("#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(_)")[2]
    body = body.partition("#define")[0]
    names = filter(of_unnamed_dimensions, re.findall(r'"([\w.]+)"', body))
    assert sorted(names) == sorted(lists.FLOAT32_APPEND)


def cases() -> dict[str, tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    """torch's own arguments for its CUDA tests, by list and operator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own = vars(AutocastTestLists("cpu"))
    found = {}
    for group in own:
        for number, (name, args, *rest) in enumerate(own[group]):
            if name.startswith("cudnn") or name == "einsum":  # cuDNN's own; not valid arguments
                continue
            named = rest[0] if rest and isinstance(rest[0], dict) else {}
            found[f"{group}-{name}-{number}"] = (group, name, args, named)
    return found


CASES = cases()


def call(group: str, name: str, args: Any, named: Any) -> Any:
    if group.startswith("methods"):
        return getattr(args[0], name)(*args[1:], **named)
    for place in (torch, torch._C._nn, torch._C._linalg, functional):
        if hasattr(place, name):
            return getattr(place, name)(*args, **named)
    raise AttributeError(name)


def expected(group: str, name: str, low: torch.dtype) -> list[torch.dtype]:
    if group.endswith("fp16"):
        return [low]
    if name in ("eq", "ge", "gt", "le", "lt", "ne") or re.fullmatch("__[engl][eqt]__", name):
        return [torch.bool]
    return [] if name == "equal" else [torch.float32]


@pytest.mark.parametrize("low", LOW, ids=["bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_results_have_the_dtypes_of_torchs_cuda_lists(low):
    """And in bfloat16 the values of every third; one low precision is enough to compare them in."""
    found = []
    for number, (case, (group, name, args, named)) in enumerate(CASES.items()):
        if group.startswith("banned"):
            continue
        args = cast(args, low, torch.float16)
        with torch.autocast("jax", low):
            got = tensors_of(call(group, name, to_jax(args), named))
        want = expected(group, name, low)
        assert {tensor.dtype for tensor in got} == set(want), case
        if low == torch.bfloat16 and number % 3 == 0 and want not in ([], [torch.bool]):
            compute = torch.float32 if group.endswith("fp16") else want[0]
            right = tensors_of(call(group, name, cast(args, compute), named))
            tolerance = 1e-4 if want == [torch.float32] else 2e-2
            found += [(case, *pair, tolerance) for pair in zip(got, right, strict=True)]
    for case, got, right, tolerance in found:
        finite = right.isfinite()
        assert torch.equal(got.cpu().isfinite(), finite), case
        error = (got.cpu().float() - right)[finite].norm() / right[finite].norm()
        assert error < tolerance, case
    assert len(found) > 25 or low == torch.float16


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def cast(tree: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """The floating tensors of a tree, or those of one dtype, in another."""

    def change(x: Any) -> Any:
        mine = isinstance(x, torch.Tensor) and x.is_floating_point() and only in (None, x.dtype)
        return x.to(dtype) if mine else x

    return pytree.tree_map(change, tree)


def test_a_loss_after_a_sigmoid_is_refused():
    x = torch.rand(4, device="jax")
    with torch.autocast("jax", torch.bfloat16):
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            functional.binary_cross_entropy(x, x)
        with torch.autocast("jax", enabled=False):
            functional.binary_cross_entropy(x, x)


def test_an_explicit_dtype_wins():
    x = torch.ones(4, dtype=torch.bfloat16, device="jax")
    with torch.autocast("jax", torch.bfloat16):
        assert x.sum().dtype == torch.float32
        assert x.sum(dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.softmax(x, 0, torch.float16).dtype == torch.float16


def test_integers_and_tensors_of_the_cpu_are_left_alone():
    x = torch.ones(2, 2, dtype=torch.int32, device="jax")
    with torch.autocast("jax", torch.bfloat16):
        assert (x @ x).dtype == torch.int32
        assert x.sum().dtype == torch.int64
        assert (draw(2, 2) @ draw(2, 2)).dtype == torch.float32


def test_two_low_precisions_do_not_mix():
    a, b = torch.ones(4, device="jax").half(), torch.ones(4, device="jax").bfloat16()
    with torch.autocast("jax", torch.bfloat16):
        with pytest.raises(RuntimeError, match=r"got torch.float16; autocast mixes torch.bfloat16"):
            torch.dot(a, b)


def test_out_and_in_place_variants_stay_as_they_are():
    x, out = torch.ones(2, 2, device="jax"), torch.zeros(2, 2, device="jax")
    with torch.autocast("jax", torch.bfloat16):
        assert torch.mm(x, x, out=out).dtype == torch.float32
        assert out.addmm_(x, x).dtype == torch.float32
    assert out.tolist() == [[4.0, 4.0], [4.0, 4.0]]


# --- Regions -------------------------------------------------------------------------------------


def test_regions_nest_and_end():
    x = torch.ones(2, 2, device="jax")
    seen = [(x @ x).dtype]
    with torch.autocast("jax", torch.bfloat16):
        seen.append((x @ x).dtype)
        assert torch.is_autocast_enabled("jax")
        with torch.autocast("jax", enabled=False):
            seen.append((x @ x).dtype)
            assert not torch.is_autocast_enabled("jax")
        with torch.autocast("jax", torch.float16):
            seen.append((x @ x).dtype)
        seen.append((x @ x).dtype)
    seen.append((x @ x).dtype)
    with torch.autocast("cpu", torch.bfloat16):
        seen.append((x @ x).dtype)
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    assert seen == [f32, bf16, f32, f16, bf16, f32, f32]
    decorated = torch.autocast("jax", torch.bfloat16)(lambda x: x @ x)
    assert decorated(x).dtype == bf16
    assert not torch.is_autocast_enabled("jax")


def test_an_error_inside_ends_the_region():
    x = torch.ones(2, 3, device="jax")
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        torch.autocast("jax", torch.bfloat16),
    ):
        x @ x
    assert (x @ x.t()).dtype == torch.float32


def test_other_threads_are_outside():
    seen = []
    x = torch.ones(2, 2, device="jax")
    with torch.autocast("jax", torch.bfloat16):
        thread = threading.Thread(target=lambda: seen.append((x @ x).dtype))
        thread.start()
        thread.join()
    assert seen == [torch.float32]


def test_a_dtype_that_is_not_low_is_refused_with_a_warning():
    x = torch.ones(2, 2, device="jax")
    with pytest.warns(UserWarning, match=r"only supports dtypes of torch.bfloat16, torch.float16"):
        with torch.autocast("jax", torch.float32):
            assert (x @ x).dtype == torch.float32


def test_views_and_writes_go_through():
    x = torch.ones(4, 4, device="jax")
    with torch.autocast("jax", torch.bfloat16):
        x[0] = 2
        x.t()[1:].mul_(3)
        assert (x[:2] @ x).dtype == torch.bfloat16
    assert x[0].tolist() == [2.0, 6.0, 6.0, 6.0]
