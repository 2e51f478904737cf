"""Reading, copying, saving and exporting tensors on the `jax` device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.errors import CopyError


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


def split(numbers: torch.Tensor, spec: tuple[str | None, ...] = ("x",)) -> torch.Tensor:
    return xs.mark_sharding(numbers.to("jax"), xs.Mesh(range(8), (8,), ("x",)), spec)


def test_reading_values():
    t = torch.tensor([[1.5, 2.5], [3.5, 4.5]]).to("jax")
    np.testing.assert_array_equal(np.array(t, dtype=np.int32), [[1, 2], [3, 4]])
    assert [row.tolist() for row in t] == t.tolist() == [[1.5, 2.5], [3.5, 4.5]]
    t.numpy()[0] = 100
    assert t[0, 0].item() == 1.5
    with pytest.raises(RuntimeError, match=r"requires grad"):
        t.requires_grad_().numpy()
    assert t.numpy(force=True).shape == (2, 2)
    with pytest.raises(CopyError, match=r"only by a copy.*local_shards"):
        np.array(t.detach(), copy=False)
    for value in (3, 2.5, True, 1 - 2j):
        got = torch.tensor(value).to("jax").item()
        assert got == value and type(got) is type(value)
    marked = split(torch.arange(8))
    assert repr(marked).startswith("tensor([0, 1, 2, 3, 4, 5, 6, 7], device='jax:0', sharding=")


def test_copies_by_the_copy_module():
    t = torch.tensor([1.0, 2.0]).to("jax")
    p = torch.nn.Parameter(torch.ones(2, device="jax"))
    (p * 3).sum().backward()
    for original in (t, p):
        copied = copy.deepcopy(original)
        assert type(copied) is type(original) and copied.requires_grad == original.requires_grad
        assert isinstance(copied, torch.nn.Parameter) == isinstance(original, torch.nn.Parameter)
        with torch.no_grad():
            copied.zero_()
        assert original.detach().cpu().all()
    assert copy.deepcopy(p).grad is None  # as on the CPU
    marked = copy.deepcopy(split(torch.arange(8.0)))
    xs.sync()
    assert tuple(marked.partition_spec) == ("x",) and marked.tolist() == list(range(8))
    first, second = copy.deepcopy([t, t])
    assert first is second
    with pytest.raises(RuntimeError, match=r"[Gg]raph leaves|created explicitly"):
        copy.deepcopy(p * 2)
    model = copy.deepcopy(torch.nn.Linear(2, 2).to("jax"))
    assert isinstance(model.weight, torch.nn.Parameter) and model.weight.device.type == "jax"


def test_the_data_setter():
    p = torch.nn.Parameter(torch.ones(2, 3, device="jax"))
    other = torch.zeros(4, device="jax")
    p.data = other
    assert p.shape == (4,) and p.tolist() == [0] * 4 and p.requires_grad and p.is_leaf
    other.add_(1)
    assert p.tolist() == [1] * 4  # one memory
    p.data.mul_(3)
    assert other.tolist() == [3] * 4
    (p * 2).sum().backward()
    assert p.grad.tolist() == [2] * 4
    p.data = torch.full((4,), 7.0, device="jax")[1:3]
    assert p.tolist() == [7, 7]
    t = torch.arange(4.0).to("jax")
    t.set_(other)
    other.add_(1)
    assert t.tolist() == [4] * 4


def test_out_arguments():
    a = torch.arange(3.0, device="jax")
    out = torch.empty(3, device="jax")
    assert torch.add(a, 1, out=out) is out and out.tolist() == [1, 2, 3]
    base = torch.zeros(2, 3, device="jax")
    torch.mul(a, 2, out=base[1])
    assert base.tolist() == [[0, 0, 0], [0, 2, 4]]
    torch.matmul(a.view(1, 3), a.view(3, 1), out=base[:1, :1])
    assert base[0].tolist() == [5, 0, 0]
    values, indices = torch.empty(0, device="jax"), torch.empty(0, dtype=torch.int64, device="jax")
    torch.max(base, 1, out=(values, indices))
    assert values.tolist() == [5, 4] and indices.tolist() == [0, 2]
    with pytest.warns(UserWarning, match=r"resized since it had shape \[3\]"):
        torch.cat([a, a], out=out)
    assert out.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(RuntimeError, match=r"can't be cast|dtype"):
        torch.add(a, 0.5, out=torch.empty(3, dtype=torch.int64, device="jax"))


DATA_DEPENDENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "mask rows": lambda x: x[x.sum(1) > 3],
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "where": lambda x: torch.where(x > 1)[0],
    "argwhere": lambda x: torch.argwhere(x),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2]).to(x.device), 0),
    "bincount": lambda x: x.flatten().to(torch.int64).bincount(),
    "is_nonzero": lambda x: torch.tensor(x[0, 1].is_nonzero()).to(x.device),
}


def test_results_whose_shape_depends_on_values(counted):
    host = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 2.0]])
    for name, call in DATA_DEPENDENT.items():
        before = counted("fallbacks")
        got, want = call(host.to("jax")), call(host)
        assert got.dtype == want.dtype and torch.equal(got.cpu(), want), name
        reads_a_value = name == "is_nonzero"  # and no more
        assert (counted("fallbacks") == before) == reads_a_value, name


def test_a_mask_keeps_the_order_in_memory():
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.permute(2, 0, 1),
        lambda x: x[:, ::2, ::2].permute(1, 2, 0),
        lambda x: x.diagonal(0, 1, 0),
        lambda x: x[:, :1].expand(2, 5, 4).permute(2, 1, 0),
    ]
    for view in views:
        found = []
        for device in ("cpu", "jax"):
            x = view(torch.arange(24.0).reshape(2, 3, 4).to(device))
            found.append(x[torch.tensor([True, False] * (len(x) // 2), device=device)])
        want, got = found
        assert got.stride() == want.stride()
        assert torch.equal(got.cpu(), want)


# --- DLPack --------------------------------------------------------------------------------------


def test_dlpack_of_a_tensor_on_one_device_shares_memory():
    t = torch.arange(6.0).to("jax").reshape(2, 3) + 0
    a = np.from_dlpack(t)
    np.testing.assert_array_equal(a, np.arange(6.0).reshape(2, 3))
    b, c = torch.from_dlpack(t), jax.dlpack.from_dlpack(t)
    pointer = iso.to_jax(t).unsafe_buffer_pointer()
    assert a.ctypes.data == b.data_ptr() == c.unsafe_buffer_pointer() == pointer
    assert type(b) is torch.Tensor and b.device.type == "cpu"
    t.add_(1)
    xs.sync()
    np.testing.assert_array_equal(a, np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(c, np.arange(6.0).reshape(2, 3))


def test_dlpack_of_views_other_dtypes_and_sharded_tensors():
    t = torch.arange(6, dtype=torch.int32).to("jax").reshape(2, 3)
    np.testing.assert_array_equal(np.from_dlpack(t.t()), np.arange(6).reshape(2, 3).T)
    np.testing.assert_array_equal(np.from_dlpack(t[1]), [3, 4, 5])
    assert torch.from_dlpack(t.to(torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(BufferError, match=r"requires grad.*detach"):
        np.from_dlpack(torch.ones(2, device="jax", requires_grad=True))
    for spec in (("x",), (None,)):
        t = split(torch.arange(8.0), spec)
        for consume in (np.from_dlpack, torch.from_dlpack, jax.dlpack.from_dlpack):
            with pytest.raises(BufferError, match=r"one buffer.*has 8.*local_shards"):
                consume(t)
        assert t.tolist() == list(range(8))


# --- The properties of XLAShardedTensor ----------------------------------------------------------


def test_an_unmarked_tensor_has_no_layout():
    t = torch.ones(4, 2, device="jax")
    assert t.mesh is t.partition_spec is t.placements is t.sharding_type is None
    assert t.sharding_spec == "" and t.local_shards is None
    xs.sync()
    assert [s.data.tolist() for s in t.local_shards] == [[[1, 1]] * 4]
    assert t.global_tensor is t


def test_local_shards_are_copies_of_the_devices_memory():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    t = iso.shard(torch.arange(64.0).reshape(8, 8), mesh, P("y", None))
    whole = torch.arange(64.0).reshape(8, 8)
    for number, piece in enumerate(t.local_shards):
        assert isinstance(piece, xs.XLAShard) and piece.rank == number
        assert torch.equal(piece.data, whole[tuple(piece.indices)])
        assert piece.replica_id == (0 if number < 4 else 1)
    pointers = {s.data.unsafe_buffer_pointer() for s in iso.to_jax(t).addressable_shards}
    assert {s.data.data_ptr() for s in iso.local_shards(t, framework="torch")} == pointers
    for piece in t.local_shards:
        piece.data.zero_()
    assert torch.equal(t.cpu(), whole)
    assert t.mesh == mesh and tuple(t.partition_spec) == ("y",)


def test_torch_asks_and_gets_answers():
    t = torch.ones(2, 3, device="jax")
    assert hash(t) == id(t) and not t.is_pinned()
    assert torch.jax.is_available() and torch.jax.device_count() == 1
    assert torch.get_device_module("jax") is torch.jax
    assert torch.jax.is_bf16_supported() is True and isinstance(torch.jax.get_device_name(), str)
    torch.jax.synchronize()
    assert torch.allclose(t, torch.ones(2, 3, device="jax")) and torch.equal(t, t.clone())
    assert not torch.equal(t, t + 1) and not torch.equal(t, t[0])
    assert torch.result_type(t, 1) == torch.float32 and t.type_as(t.half()).dtype == torch.float16


def test_wide_types_with_x64(x64):
    t = torch.tensor([2**40, -(2**50)]).to("jax")
    assert (t + 1).tolist() == [2**40 + 1, -(2**50) + 1]
    d = torch.tensor([1.0], dtype=torch.float64).to("jax") / 3
    assert d.dtype == torch.float64 and d.item() == 1 / 3
    assert torch.ones(2, device="jax").double().dtype == torch.float64
    assert (torch.ones(2, device="jax") * (1 / 3)).dtype == torch.float32


def test_what_depends_on_no_input_is_no_execution(counted):
    xs.sync()
    before = counted("executions")
    x = torch.ones(4, device="jax") * 2  # pending
    ids = torch.arange(6, device="jax").unsqueeze(0) + 3
    steps = torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1)
    assert ((steps != 1).cumsum(-1)[:, -1] == 0).all()
    assert int(ids.sum()) == 33
    assert counted("executions") == before
    x += 1
    assert x.sum().item() == 12.0  # floats are computed with the rest
    assert bool((x == 3).all())
    random = torch.randint(0, 9, (4,), device="jax")
    assert 0 <= int(random.max()) < 9
    assert counted("executions") > before


def test_a_llama_without_a_mask_is_one_program_a_step(counted):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(config).to("jax")
    ids = torch.arange(8, device="jax").reshape(2, 4)
    xs.sync()
    before = counted("executions")
    for n in range(2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        xs.sync()
        assert counted("executions") == before + n + 1
