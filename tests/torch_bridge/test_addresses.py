"""`data_ptr()` and `untyped_storage()` tell which memory a tensor is in, as torch's do."""

import itertools

import pytest
import safetensors.torch
import torch

import isoshard as iso
import isoshard.torch_bridge
from isoshard import P


def _ask(device):
    """Offsets between addresses, sizes, and which storages are one."""
    x = torch.arange(12.0, device=device).reshape(3, 4)
    tensors = {
        "itself": x,
        "row": x[1],
        "column": x[:, 2],
        "turned": x.t(),
        "detached": x.detach(),
        "as bytes": x.view(torch.uint8),
        "other": x.clone(),
        "half": x.bfloat16(),
    }
    said = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        same = storage.data_ptr() == x.untyped_storage().data_ptr()
        offset = tensor.data_ptr() - x.data_ptr() if same else None
        said[name] = (same, offset, storage.nbytes(), storage.size(), len(storage))
    return said


def test_as_on_the_cpu():
    assert _ask("jax") == _ask("cpu")


def test_no_two_memories_overlap():
    tensors = [torch.ones(n, device="jax") for n in (1, 1000, 3, 128, 129)]
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert torch.ones(0, device="jax").data_ptr() == 0
    assert torch.ones(0, device="jax").untyped_storage().data_ptr() == 0


def test_an_address_stays_while_values_change():
    x = torch.ones(8, 4, device="jax")
    before, storage = x.data_ptr(), x.untyped_storage()
    x += 1
    assert x.tolist() == [[2.0] * 4] * 8
    x.mul_(2)
    assert x.data_ptr() == storage.data_ptr() == before
    assert x.detach().untyped_storage() == storage
    assert hash(x.t().untyped_storage()) == hash(storage)
    assert torch.ones(8, 4, device="jax").untyped_storage() != storage


def test_what_a_storage_says():
    storage = torch.ones(8, 4, device="jax").untyped_storage()
    assert storage.device == torch.device("jax", 0)
    assert "128 bytes on jax:0" in repr(storage)
    assert not storage.is_cuda and not storage.is_shared() and not storage.resizable()
    assert storage.element_size() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.UntypedStorage(device="jax"),
        lambda: torch.UntypedStorage(8, device=torch.device("jax", 0)),
        lambda: torch.TypedStorage(8, dtype=torch.float32, device="jax"),
    ],
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_of_torchs_on_the_device_is_refused(make):
    with pytest.raises(RuntimeError, match=r"belongs to JAX, and UntypedStorage\(\.\.\) would"):
        make()
    assert torch.UntypedStorage(8).nbytes() == torch.UntypedStorage([0] * 8).nbytes() == 8


def test_reading_is_refused():
    storage = torch.ones(2, device="jax").untyped_storage()
    for name in ("tolist", "cpu", "copy_", "resize_", "clone", "share_memory_"):
        with pytest.raises(RuntimeError, match=rf"belongs to JAX, and {name}\(\) would read"):
            getattr(storage, name)()
    with pytest.raises(RuntimeError, match=r"indexing would read or change it; use"):
        storage[0]
    with pytest.raises(RuntimeError, match="indexing would read"):
        storage[0] = 1
    assert not hasattr(storage, "nonsense")


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("where", ["one device", "mesh"])
def test_safetensors(tmp_path, mesh, where):
    model, there = Tied(), Tied()
    there.load_state_dict(model.state_dict())
    there = there.to("jax")
    if where == "mesh":
        there = iso.shard(there, mesh, iso.Plan({"*embedding.weight": P("x")}))
    assert there.head.weight is there.embedding.weight
    safetensors.torch.save_model(there, tmp_path / "model")
    files = safetensors.torch.load_file(tmp_path / "model")
    assert len(files) == 3  # the tie is written once
    again = Tied()
    safetensors.torch.load_model(again, tmp_path / "model")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)
    with torch.no_grad():
        there.norm.weight.zero_()
    safetensors.torch.load_model(there, tmp_path / "model")
    assert there.norm.weight.tolist() == [1.0] * 4
    state = {name: value.detach().clone() for name, value in there.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "state")
    back = safetensors.torch.load_file(tmp_path / "state")
    torch.testing.assert_close(back["norm.bias"], model.norm.bias.detach())


def test_shared_memory_is_refused_by_name(tmp_path):
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(Tied().to("jax").state_dict(), tmp_path / "tied")
