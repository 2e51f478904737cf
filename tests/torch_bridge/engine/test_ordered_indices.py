"""Reading by index arrays that are whole axes in order: a reshape, and no gather."""

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.runtime.hlo_collectives import collectives


def axis(count, dim, rank, **options):
    shape = [1] * rank
    shape[dim] = count
    return torch.arange(count, **options).reshape(shape)


WHOLE = {
    "a mask of transformers": lambda x, device: x[
        torch.arange(4, device=device)[:, None, None, None],
        (torch.arange(8, device=device) + 0)[None, None, None, :],
    ],
    "axes exchanged": lambda x, device: x[
        axis(4, 1, 2, device=device), axis(8, 0, 2, device=device)
    ],
    "rows only": lambda x, device: x[torch.arange(4, device=device)],
    "rows of 32 bits": lambda x, device: x[
        torch.arange(4, device=device, dtype=torch.int32)[:, None]
    ],
    "one element": lambda x, device: x[:, :1][
        axis(4, 0, 3, device=device), axis(1, 0, 1, device=device)
    ],
}
OTHER = {
    "another order": lambda x, device: x[3 - torch.arange(4, device=device)],
    "from 1": lambda x, device: x[:, torch.arange(1, 8, device=device)],
    "times 1": lambda x, device: x[:3][torch.arange(3, device=device) * 1],
    "shifted": lambda x, device: x[torch.arange(3, device=device) + 1],
    "a part": lambda x, device: x[torch.arange(3, device=device)],
    "the diagonal": lambda x, device: x[
        torch.arange(4, device=device), torch.arange(4, device=device)
    ],
    "a slice first": lambda x, device: x[:, torch.arange(8, device=device)],
    "two axes of one": lambda x, device: x[torch.arange(4, device=device).reshape(2, 2)],
    "every second": lambda x, device: x[torch.arange(0, 4, 2, device=device)],
    "both ways": lambda x, device: x[:, :4][
        axis(4, 0, 2, device=device), torch.arange(4, device=device).expand(4, 4)
    ],
    "turned around": lambda x, device: x[axis(4, 0, 2, device=device, dtype=torch.int64).flip(0)],
}


@pytest.mark.parametrize("read", [*WHOLE.values(), *OTHER.values()], ids=[*WHOLE, *OTHER])
@pytest.mark.parametrize("shape", [(4, 8), (4, 8, 3)], ids=str)
def test_reads_equal_those_of_torch(read, shape):
    x = torch.randn(shape)
    assert torch.equal(read(x.to("jax"), "jax").cpu(), read(x, "cpu"))


@pytest.mark.parametrize("read", WHOLE.values(), ids=WHOLE)
def test_gradients_equal_those_of_torch(read):
    x, weight = torch.randn(4, 8), torch.randn(read(torch.zeros(4, 8), "cpu").shape)
    gradients = []
    for device in ("cpu", "jax"):
        leaf = x.detach().to(device).requires_grad_()
        (read(leaf, device) * weight.to(device)).sum().backward()
        gradients.append(leaf.grad.cpu())
    assert torch.equal(*gradients)


def program_of(read, x):
    """The text of a program that reads, and no more."""
    step = xs.compile(lambda x: read(x, "jax"))
    step(x)
    return xs.program_text(step)


@pytest.mark.parametrize("read", WHOLE.values(), ids=WHOLE)
def test_nothing_is_gathered(read):
    assert " gather(" not in program_of(read, torch.randn(4, 8).to("jax"))


def test_another_order_is_gathered():
    assert " gather(" in program_of(lambda x, device: x[x[:, 0].long()], torch.ones(4, 8).to("jax"))


def test_the_padding_mask_of_a_sharded_batch_stays_where_it_is():
    mesh = iso.make_mesh((2, 4), ("data", "model"))
    mask = iso.shard(torch.ones(4, 8), mesh, P("data"))
    assert not collectives(program_of(WHOLE["a mask of transformers"], mask))
