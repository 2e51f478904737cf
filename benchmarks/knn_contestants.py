"""Who searches neighbours in `benchmarks.domain_knn`, each in processes of its own.

Each tells the seconds of each call, resident memory at its peak, and what it found (the sums of
distances and of indices), so that one can see whether all found the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.harness import timing

DEVICES = 4
WARMUP = 2


def measured(name: str, points: int, queries: int, k: int, rounds: int) -> dict[str, Any]:
    """Measure one contestant."""
    return CONTESTANTS[name](*clouds(points, queries), k, rounds)


def clouds(points: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and queries in space, normally distributed, float32[.., 3]."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((n, 3), np.float32) for n in (points, queries))


def isoshard(points: np.ndarray, queries: np.ndarray, k: int, rounds: int) -> dict[str, Any]:
    """`iso.domain.points.knn` over virtual devices of one process, both clouds split."""
    import isoshard as iso
    from isoshard.domain.points import knn

    iso.simulate_devices(DEVICES)
    a, b = _split(points, queries)
    return _measured(lambda: knn(a, b, k), lambda it: _sums(it.distances, it.indices), rounds)


def isoshard_gradient(
    points: np.ndarray, queries: np.ndarray, k: int, rounds: int
) -> dict[str, Any]:
    """Likewise, with the gradients of the sum of the distances by both clouds."""
    import jax

    import isoshard as iso
    from isoshard.domain.points import knn

    iso.simulate_devices(DEVICES)
    a, b = _split(points, queries)
    array = (lambda x: x.array) if isinstance(b, iso.UnevenArray) else (lambda x: x)

    def loss(a: Any, b: Any) -> tuple[jax.Array, Any]:
        neighbours = knn(a, b, k)
        distance = array(neighbours.distances)
        return jax.numpy.where(distance < jax.numpy.inf, distance, 0).sum(), neighbours

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return _measured(
        lambda: step(a, b), lambda it: _sums(it[0][1].distances, it[0][1].indices), rounds
    )


def torch_alone(points: np.ndarray, queries: np.ndarray, k: int, rounds: int) -> dict[str, Any]:
    """The usual formula in plain torch, with all threads."""
    import torch

    a, b = torch.from_numpy(points), torch.from_numpy(queries)
    return _measured(lambda: _formula(a, b, k), lambda it: _sums(it[1], it[2]), rounds)


def dtensor(points: np.ndarray, queries: np.ndarray, k: int, rounds: int) -> dict[str, Any]:
    """The same formula on DTensors, one rank of those that torchrun's variables name."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (DEVICES,))
    a, b = (distribute_tensor(torch.from_numpy(x), mesh, [Shard(0)]) for x in (points, queries))

    def sums(it: Any) -> list[float]:
        return _sums(it[1].full_tensor(), it[2].full_tensor())

    result = _measured(lambda: _formula(a, b, k), sums, rounds, dist.barrier)
    dist.destroy_process_group()
    return result


CONTESTANTS = {
    "isoshard": isoshard,
    "isoshard with gradients": isoshard_gradient,
    "torch": torch_alone,
    "DTensor": dtensor,
}


def _formula(x: Any, y: Any, k: int) -> tuple[Any, Any, Any]:
    """What a tutorial of ShardTensor searches with: neighbours, distances, indices."""
    import torch

    distance = torch.norm(x[None, :, :] - y[:, None, :], dim=2)
    distances, indices = torch.topk(distance, k=k, dim=1, largest=False)
    return x[indices], distances, indices


def _split(points: np.ndarray, queries: np.ndarray) -> tuple[Any, Any]:
    import isoshard as iso
    from isoshard import P

    mesh = iso.make_mesh((DEVICES,), ("x",))
    return tuple(iso.shard(x, mesh, P("x"), uneven="pad") for x in (points, queries))


def _sums(distances: Any, indices: Any) -> list[float]:
    """The sums of distances and indices over valid rows."""
    sums = []
    for x in (distances, indices):
        if hasattr(x, "mask"):
            x = np.asarray(x.array)[np.asarray(x.mask())]
        sums.append(float(np.asarray(x, np.float64).sum()))
    return sums


def _measured(
    search: Callable[[], Any],
    sums: Callable[[Any], list[float]],
    rounds: int,
    meet: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Time calls that return when their work is done; memory is read after them."""
    wait = sys.modules["jax"].block_until_ready if "jax" in sys.modules else lambda x: x

    def once() -> None:
        wait(search())
        meet()

    before = timing.resident("VmRSS")
    first = timing.seconds(lambda: wait(search()))
    for _ in range(WARMUP):
        wait(search())
    seconds = []
    for _ in range(rounds):
        meet()
        seconds.append(timing.seconds(once))
    result = {
        "first_s": first,
        "seconds": seconds,
        "before": before,
        "peak": timing.resident("VmHWM"),
    }
    return {**result, "sums": sums(search())}
