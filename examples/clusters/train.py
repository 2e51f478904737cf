"""A decoder of `transformers` trains under FSDP2 and tensor parallelism, and survives its ranks.

    torchrun --standalone --nproc-per-node 4 --max-restarts 5 examples/clusters/train.py --out run

Every rank is one process with one device. Some steps are torch's, the next ones JAX's, on the same
memory. Every `--every` steps the run is saved; started again, on as many ranks or on others, it
goes on from the last checkpoint that was committed, with the batch that comes next. SIGTERM saves
and ends every rank with status 75 within `--grace` seconds. `RUN/losses.jsonl` has a line for each
step. With `--by jax` all steps are JAX's, on arrays of its own, and a process may have several
devices, so it runs on TPUs. docs/clusters.md has the commands for each kind of cluster.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import isoshard as iso
from isoshard import P

SAMPLES, LENGTH, VOCABULARY = 400, 24, 64
RATE, DECAY = 3e-3, 1e-2
ADAM = 3  # a checkpoint has the parameters and two moments of each
COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")
PLAN = iso.Plan(
    {
        **{f"*.{name}.weight": P("tp", "dp") for name in (*COLUMNS, "lm_head")},
        **{f"*.{name}.weight": P("dp", "tp") for name in ROWS},
        "*": P("dp"),
    }
)


class Decoder(torch.nn.Module):
    """A Llama with random weights, and its loss."""

    def __init__(self) -> None:
        """Small enough for a laptop's cores."""
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
        )
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of every next token; `tokens` is (rows, LENGTH + 1), int32."""
        logits = self.llama(input_ids=tokens[:, :-1].long(), use_cache=False).logits
        targets = tokens[:, 1:].flatten().long()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)


def decoder() -> Decoder:
    """The same in every process and in every start."""
    torch.manual_seed(0)
    return Decoder()


def dataset() -> torch.Tensor:
    """Sentences of a language with a rule: (SAMPLES, LENGTH + 1), int32."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCABULARY, (SAMPLES,), generator=generator)]
    for _ in range(LENGTH):
        noise = torch.randint(3, (SAMPLES,), generator=generator)
        tokens.append((5 * tokens[-1] + noise) % VOCABULARY)
    return torch.stack(tokens, 1).int()


def adamw_step(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A step in JAX; the state has torch's names: exp_avg, exp_avg_sq and step, by parameter."""
    adam = optax.adamw(RATE, weight_decay=DECAY)

    def step(params: Any, opt_state: Any, buffers: Any, batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: forward({**p, **buffers}, batch))(params)
        moments, *rest = adam.init(params)
        count = next(iter(opt_state["step"].values())).astype(jnp.int32)
        moments = moments._replace(count=count, mu=opt_state["exp_avg"], nu=opt_state["exp_avg_sq"])
        updates, (moments, *_) = adam.update(grads, (moments, *rest), params)
        steps = {name: moments.count.astype(jnp.float32) for name in params}
        opt_state = {"exp_avg": moments.mu, "exp_avg_sq": moments.nu, "step": steps}
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def compiled(
    step: Callable[..., Any], params: Any, opt_state: Any, mesh: Any
) -> Callable[..., Any]:
    """The step, whose results lie as its arguments do."""
    layouts = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))
    return jax.jit(step, out_shardings=(*layouts, jax.NamedSharding(mesh, P())))


class InRanks:
    """DTensors: each process is one rank with one device, and steps are torch's or JAX's.

    Args:
        ranks: how many there are.
        tp: how many share each layer; the others share the batch.
    """

    def __init__(self, ranks: int, tp: int) -> None:
        """Fresh; `fill` takes what a checkpoint has."""
        _check_divides(tp, ranks)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(self.device, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        self.mesh = mesh
        self.part = mesh.get_local_rank("dp"), mesh["dp"].size()
        self.model = sharded(decoder().to(self.device), mesh)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.nbytes = sum(param.nbytes for param in self.model.parameters())
        named = self.model.named_parameters()
        self.optimizer = torch.optim.AdamW(named, lr=RATE, weight_decay=DECAY)
        with torch.device("meta"):
            self.forward = iso.jax_function(Decoder())
        self.compiled: Any = None

    def tree(self) -> dict[str, Any]:
        """What is saved; restoring fills it in place."""
        return {"model": self.model, "optimizer": self.optimizer}

    def fill(self, tree: Mapping[str, Any]) -> None:
        """All is in its place already."""

    def step(self, rows: torch.Tensor, in_torch: bool) -> float:
        """Train on this rank's rows; the loss of the global batch."""
        rows = rows.to(self.device)
        return self.by_torch(rows) if in_torch else self.by_jax(rows)

    def by_torch(self, rows: torch.Tensor) -> float:
        """As under torch alone."""
        self.optimizer.zero_grad()
        loss = self.model(rows)
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        torch.distributed.all_reduce(loss)
        return float(loss) / torch.distributed.get_world_size()

    def by_jax(self, rows: torch.Tensor) -> float:
        """By JAX, on torch's memory and back into it."""
        buffers = iso.to_jax(self.model)
        params = {name: buffers.pop(name) for name in self.names}
        optimizer = iso.to_jax(self.optimizer)
        batch = iso.to_jax(DTensor.from_local(rows, self.mesh, [Shard(0), Replicate()]))
        if self.compiled is None:
            self.compiled = compiled(
                adamw_step(self.forward), params, optimizer, batch.sharding.mesh
            )
        params, optimizer, loss = self.compiled(params, optimizer, buffers, batch)
        iso.checkpoint.load_arrays(self.model, params)
        iso.checkpoint.load_arrays(self.optimizer, optimizer)
        return float(loss)


def sharded(model: Decoder, mesh: DeviceMesh) -> Decoder:
    """Heads and features over "tp", FSDP2 over "dp"."""
    if mesh["tp"].size() > 1:
        styles: dict[str, Any] = {"llama.lm_head": ColwiseParallel(output_layouts=Replicate())}
        styles |= {f"llama.model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
        styles |= {f"llama.model.layers.*.{name}": RowwiseParallel() for name in ROWS}
        parallelize_module(model, mesh["tp"], styles)
    for layer in model.llama.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


class InJax:
    """Arrays of JAX, with any number of devices in each process.

    Args:
        tp: how many devices share each layer; the others share the batch.
    """

    part = (0, 1)  # every process has the global batch, and places its devices' shards

    def __init__(self, tp: int) -> None:
        """Fresh; `fill` takes what a checkpoint has."""
        _check_divides(tp, jax.device_count())
        self.mesh = iso.make_mesh((jax.device_count() // tp, tp), ("dp", "tp"))
        model = decoder()
        forward = iso.jax_function(model)
        params = {name: param.detach().numpy() for name, param in model.named_parameters()}
        buffers = {name: buffer.numpy() for name, buffer in model.named_buffers()}
        self.nbytes = sum(param.nbytes for param in params.values())
        moments = {name: np.zeros_like(param) for name, param in params.items()}
        steps = {name: np.zeros((), np.float32) for name in params}
        self.params = iso.shard(params, self.mesh, PLAN)
        self.buffers = iso.shard(buffers, self.mesh, P())
        both = {kind: iso.shard(moments, self.mesh, PLAN) for kind in ("exp_avg", "exp_avg_sq")}
        self.opt_state = {**both, "step": iso.shard(steps, self.mesh, P())}
        self.compiled = compiled(adamw_step(forward), self.params, self.opt_state, self.mesh)

    def tree(self) -> dict[str, Any]:
        """What is saved; restoring gives another such tree."""
        return {"model": self.params, "optimizer": self.opt_state}

    def fill(self, tree: Mapping[str, Any]) -> None:
        """Go on with what was restored."""
        self.params, self.opt_state = tree["model"], tree["optimizer"]

    def step(self, rows: torch.Tensor, in_torch: bool) -> float:
        """Train on the rows of the global batch."""
        batch = iso.shard(rows.numpy(), self.mesh, P("dp"))
        self.params, self.opt_state, loss = self.compiled(
            self.params, self.opt_state, self.buffers, batch
        )
        return float(loss)


def _check_divides(tp: int, devices: int) -> None:
    if devices % tp:
        raise ValueError(f"--tp {tp} does not divide the {devices} devices of the run")


def main(arguments: Sequence[str] | None = None, *, signals: bool = True) -> None:
    """Train.

    Args:
        arguments: of the command line.
        signals: False where this is not the main thread, which alone gets SIGTERM (Ray Train).
    """
    args = parsed(arguments)
    in_jax = args.by == "jax"
    local_devices = None if in_jax else 1
    processes = iso.distributed.init_distributed(
        heartbeat=args.heartbeat, local_devices=local_devices
    )
    trainer = InJax(args.tp) if in_jax else InRanks(processes.size, args.tp)
    order = iso.data.BatchOrder(SAMPLES, args.batch, seed=args.seed)
    iso.checkpoint.check_storage(
        args.out, ADAM * trainer.nbytes, keep=args.keep, seconds=args.grace
    )

    def state(step: int) -> dict[str, Any]:
        return {**trainer.tree(), "data": order.state_dict(step), "step": step}

    start, tokens = iso.latest(args.out) or 0, dataset()
    if start:
        restored = iso.restore(args.out, state(start), step=start)
        order.check(restored["data"], start)
        trainer.fill(restored)
    log = Log(args.out, processes, start)
    batches = order.after(start, *trainer.part)
    asking = (signal.SIGTERM,) if signals else ()
    with iso.distributed.Termination(grace=args.grace, signals=asking) as termination:
        for step, numbers in zip(range(start, args.steps), batches, strict=False):
            in_torch = not in_jax and step // args.turn % 2 == 0
            loss = trainer.step(tokens[torch.from_numpy(numbers)], in_torch)
            log.line(step=step, loss=loss, by="torch" if in_torch else "jax", rows=numbers.tolist())
            done = step + 1
            last = termination.reached()
            if last or done == args.steps or done % args.every == 0:
                iso.save(args.out, state(done), step=done, keep=args.keep)
            if last and done < args.steps:
                log.line(saved=done, status=termination.STATUS)
                termination.leave()


class Log:
    """Lines of JSON, by rank 0, in a file that every start goes on with.

    Args:
        out: the folder.
        processes: of the run.
        start: the first step.
    """

    def __init__(self, out: Path, processes: iso.distributed.Processes, start: int) -> None:
        """Says who runs."""
        self.file = (out / "losses.jsonl").open("a") if processes.rank == 0 else None
        self.line(start=start, ranks=processes.size, launcher=processes.launcher)

    def line(self, **values: Any) -> None:
        """Write one line, with the time."""
        if self.file is not None:
            self.file.write(json.dumps({**values, "time": time.time()}) + "\n")
            self.file.flush()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a folder that all ranks see")
    add("--steps", type=int, default=200)
    add("--every", type=int, default=20, help="steps between checkpoints")
    add("--keep", type=int, default=2, help="checkpoints that stay")
    add("--batch", type=int, default=16, help="rows of all ranks together")
    add("--tp", type=int, default=2, help="ranks (or devices) that share each layer")
    add("--by", choices=("both", "jax"), default="both", help="DTensors, or JAX's arrays alone")
    add("--turn", type=int, default=10, help="steps by torch, then as many by JAX")
    add("--seed", type=int, default=0, help="of the order of samples")
    add("--grace", type=float, default=20, help="seconds from SIGTERM to the end")
    add("--heartbeat", type=float, default=20, help="seconds that a rank may be silent")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
