"""The compilation cache on disk, across processes."""

import subprocess
import sys
import textwrap

import pytest

import isoshard as iso

PROGRAM = """
    import sys
    import isoshard as iso
    iso.simulate_devices(4)
    import jax, torch, isoshard.torch_bridge as xs
    iso.compilation_cache(sys.argv[1])
    mesh = iso.make_mesh((4,), ("data",))
    torch.manual_seed(0)
    model = iso.shard(torch.nn.Linear(8, 4), mesh, iso.Plan([("weight", iso.P(None, "data"))], default=iso.P()))
    optimizer = torch.optim.Adam(model.parameters())
    @xs.compile
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()
    x = torch.ones(4, 8).to("jax")
    losses = [step(x).item() for _ in range(3)]
    counted = iso.metrics.counters()
    print(losses, counted["compilations"], counted["cache_hits"])
"""  # noqa: E501


def run(folder) -> tuple[str, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    losses, compiled, hits = done.stdout.strip().rsplit(" ", 2)
    return losses, int(compiled), int(hits)


def test_a_second_process_compiles_nothing(tmp_path):
    first, compiled, hits = run(tmp_path / "xla")
    assert compiled >= 1 and hits == 0
    second, compiled_again, hits = run(tmp_path / "xla")
    assert second == first
    assert hits == compiled_again == compiled


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        iso.compilation_cache(tmp_path / "file" / "cache")
