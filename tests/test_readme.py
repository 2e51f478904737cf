"""README.md: its samples run alone, its figures are those measured, each claim has a test."""

from __future__ import annotations

import doctest
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests import fresh, readme_claims
from tests.doc_blocks import blocks
from tools.harness.results import saved

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
SAMPLES = {
    name: block.code for name, block in zip(("jax", "torch", "both"), blocks(TEXT), strict=True)
}
MODELS = {
    "mlp": "MLP 512-2048-2048-512",
    "gpt2": "GPT-2 small's shape",
    "resnet50": "ResNet-50, width 16",
    "vit": "ViT-B's shape",
}
MINUTE = 60


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as a reader would: alone, with one CPU device until it asks for more."""
    return fresh.run(code, cwd=folder, env={"JAX_PLATFORMS": "cpu"}, timeout=500)


def line_of(words: str) -> str:
    """The line of README.md with these words."""
    [line] = [line for line in TEXT.splitlines() if words in line]
    return line


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def test_examples():
    result = doctest.testmod(readme_claims)
    assert result.failed == 0 and result.attempted


def test_each_claim_has_tests_that_are_there():
    assert list(readme_claims.faults(TEXT, readme_claims.CLAIMS, ROOT)) == []


@pytest.mark.parametrize(
    ("text", "claims", "said"),
    [
        ("it is fast\n", {}, "0 claims are in the line 'it is fast'"),
        ("it is fast\n", {"is": (), "fast": ()}, "2 claims are in the line"),
        ("fast\n", {"fast": (), "small": ()}, "no line says 'small'"),
        ("fast\n", {"fast": ()}, "'fast' has no test"),
        ("fast\n", {"fast": ("tests/none.py::test_it",)}, "there is no tests/none.py::test_it"),
        (
            "fast\n",
            {"fast": ("tests/test_readme.py::test_none",)},
            "there is no tests/test_readme.py::test_none",
        ),
    ],
)
def test_a_claim_without_a_test_is_found(text, claims, said):
    assert any(said in fault for fault in readme_claims.faults(text, claims, ROOT))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_short(name):
    assert len([line for line in SAMPLES[name].splitlines() if line]) <= 12


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_runs_alone_in_less_than_a_minute(name, tmp_path):
    """Processor time of all cores, which a busy machine does not change."""
    took = "import time; print(f'processor: {time.process_time()}')\n"
    done = run(SAMPLES[name] + took, tmp_path)
    assert done.returncode == 0 and done.stdout.count("\n") > 1, done.stderr
    assert float(done.stdout.rpartition("processor: ")[2]) < MINUTE


def test_the_torch_sample_compiles_one_program(tmp_path):
    code = SAMPLES["torch"] + "print('programs', len(iso.metrics.compilations()))\n"
    done = run(code, tmp_path)
    assert done.stdout.endswith("programs 1\n"), done.stdout + done.stderr


def test_lines_are_no_longer_than_160_characters():
    assert [line for line in TEXT.splitlines() if len(line) > 160] == []


def test_every_page_is_linked():
    linked = set(re.findall(r"\]\((docs/\w+\.md)", TEXT))
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages - linked == set()


def test_the_commands_of_make_are_there():
    named = set(re.findall(r"^make ([\w-]+)|`make ([\w-]+)`", TEXT, re.M))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {first or second for first, second in named}
    assert {"demo", "domain", "docs", "help", "bench"} <= named <= targets


def test_the_table_of_speed_is_what_was_measured():
    for name, words in MODELS.items():
        of = saved("training")[name]["contestants"]
        by_hand, compiled = of["pure JAX"], of["torch, compiled"]
        row = line_of(f"| {words}").split("|")
        assert f"({by_hand['median_ms']:.0f} ms)" in row[1]
        ratios = compiled["ratio"], of["torch, lazy"]["ratio"], compiled["memory_ratio"]
        assert [cell.strip() for cell in row[2:5]] == [f"{ratio:.2f}" for ratio in ratios]
        assert max(one["loss_difference"] for one in of.values()) <= 1e-4
        sent = [
            (sum(count for count, _ in one.values()), sum(size for _, size in one.values()) / 1e6)
            for one in (compiled["collectives"], by_hand["collectives"])
        ]
        (count, size), (other, other_size) = sent
        equal = f" equal: {count}, {size:.1f} MB "
        apart = f" {count} against {other}, {size:.1f} MB against {other_size:.1f} "
        assert row[5] == (equal if sent[0] == sent[1] else apart)


def test_what_peers_take_is_what_was_measured():
    of = saved("training")
    took = {
        peer: [of[name]["peers"][peer].get("ratio") for name in MODELS]
        for peer in ("torchax, jitted", "torch_xla, SPMD", "DTensor, gloo")
    }
    line = line_of("Peers on the same steps").replace("torch_xla 2.9", "torch_xla")
    said = [*took["torchax, jitted"], *took["torch_xla, SPMD"]]
    assert numbers(line) == [round(ratio, 2) for ratio in said]
    dtensor = took["DTensor, gloo"]
    assert dtensor[2] is None and "fails on ResNet" in line_of("DTensor in four processes")
    line = line_of("DTensor in four processes")
    assert numbers(line) == [round(ratio, 1) for ratio in dtensor if ratio]
    torch_alone = [of[name]["contestants"]["torch, CPU"]["ratio"] for name in MODELS]
    lowest, highest = (round(one, 2) for one in (min(torch_alone), max(torch_alone)))
    line = line_of("Where we lose")
    assert (
        f"{lowest} to {highest} of the JAX step" in line and "torchax is faster on the MLP" in line
    )
    compiled = [of[name]["contestants"]["torch, compiled"]["ratio"] for name in MODELS]
    faster = [peer < ours for peer, ours in zip(took["torchax, jitted"], compiled, strict=True)]
    assert faster == [True, False, False, False]


def test_what_compiled_is_what_is_noted():
    noted = (ROOT / "docs" / "aot.md").read_text()
    for target, words in (("v5e", "| TPU v5e | nothing |"), ("h100", "| GPU, H100 | nothing |")):
        [found] = re.findall(rf"(\d+) entries of the database and (\d+) steps for {target}", noted)
        said = line_of(words)
        assert f"{found[0]} entries of torch's operator database" in said
        assert f"{found[1]} training steps" in said
    assert "Everything that was tried compiles." in noted
    assert ("four are open" in line_of("| TPU v5e |")) == ("Four entries are open for v5e" in noted)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_sparse_and_quantised_tensors_are_refused():
    import isoshard.torch_bridge  # noqa: F401 (the device)

    for make in (
        lambda: torch.eye(3).to("jax").to_sparse(),
        lambda: torch.eye(3).to_sparse().to("jax"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8).to("jax"),
        lambda: torch.quantize_per_tensor(torch.ones(3).to("jax"), 0.1, 0, torch.quint8),
    ):
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            make()
