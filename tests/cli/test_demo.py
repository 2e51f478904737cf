"""The demo: its data, its model in both frameworks, and the command on a small mesh."""

import json
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import isoshard as iso
from isoshard.cli import main
from isoshard.cli.demo import command, crossing, data, flax_model, model, training
from isoshard.cli.demo.training import Run, Settings
from isoshard.core.installation import install_command
from tests import fresh

SMALL = model.Config(layers=1, width=32, heads=4, length=16)

WITHOUT_MATPLOTLIB = """
import dataclasses, json, sys
sys.modules["matplotlib"] = None
from isoshard.cli import main
from isoshard.cli.demo import command

settings, config = command.SHORT
small = dataclasses.replace(config, layers=1, width=32, heads=4, length=16)
command.SHORT = dataclasses.replace(settings, validation_batches=2), small
results = command.Report.results


def told(report, runs):
    with open("runs.json", "w") as file:
        json.dump([dataclasses.asdict(run) for run in runs], file)
    results(report, runs)


command.Report.results = told
sys.exit(main(["demo", "--steps", "3"]))
"""


@pytest.fixture(scope="module")
def corpus():
    return data.load()


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """What the short demo says, and its runs, in a new process without matplotlib."""
    folder = tmp_path_factory.mktemp("demo")
    done = fresh.run(WITHOUT_MATPLOTLIB, cwd=folder)
    assert done.returncode == 0, done.stderr
    runs = [Run(**one) for one in json.loads((folder / "runs.json").read_text())]
    return " ".join(done.stdout.split()), runs


def parameters(module):
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


class TestData:
    def test_is_the_standard_library_and_the_same_every_time(self, corpus):
        again = data.load()
        np.testing.assert_array_equal(corpus.train, again.train)
        np.testing.assert_array_equal(corpus.validation, again.validation)
        assert corpus.train_files > 5 * corpus.validation_files > 0
        assert corpus.train.size > 1_000_000

    def test_no_file_is_in_both_parts(self, corpus):
        calendar = Path(sysconfig.get_path("stdlib"), "calendar.py").read_bytes()
        assert data.is_validation("calendar.py")
        assert calendar in corpus.validation.tobytes()
        assert calendar not in corpus.train.tobytes()

    def test_a_batch_is_a_function_of_its_number(self, corpus):
        tokens, targets = corpus.training_batch(3, batch=4, length=16)
        same, _ = corpus.training_batch(3, batch=4, length=16)
        other, _ = corpus.training_batch(4, batch=4, length=16)
        np.testing.assert_array_equal(tokens, same)
        assert not np.array_equal(tokens, other)
        np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
        assert tokens.dtype == targets.dtype == np.int64

    def test_a_folder_without_sources_is_refused(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"standard library.*has 0 of them"):
            data.load(tmp_path)


class TestTwin:
    def test_computes_what_torch_computes_on_the_same_buffers(self, short):
        said, (on_mesh, _, twin, _) = short
        assert re.search(r"as a Flax NNX twin: [\d.]+, agrees", said)
        assert "136 of 136 parameter buffers have one address in torch" in said
        assert twin.validation == pytest.approx(on_mesh.validation, rel=1e-5)

    def test_wrong_parameters_are_named(self):
        params = parameters(training.new_model(SMALL))
        del params["ln.bias"]
        params["head.weight"] = params["head.weight"].T
        with pytest.raises(ValueError, match=r"differ in head\.weight, ln\.bias"):
            flax_model.adopt(SMALL, params)

    def test_a_copy_is_not_counted_as_shared(self, mesh):
        a = iso.shard(np.ones((8, 4), np.float32), mesh, iso.P("data"))
        assert crossing.count_shared({"a": a}, {"a": a.copy()}) == (8, 0)


class TestTraining:
    def test_mesh_and_cpu_learn_alike_and_jax_agrees(self, short):
        said, (on_mesh, function, twin, on_cpu) = short
        np.testing.assert_allclose(on_mesh.losses, on_cpu.losses, rtol=1e-4)
        assert len(on_mesh.losses) == 3 and function.losses == twin.losses == []
        apart = re.search(r"the losses of the .*steps, .*, are at most (\S+) apart", said)
        assert float(apart[1]) < 1e-4
        assert on_mesh.validation == pytest.approx(on_cpu.validation, rel=1e-4)
        assert function.validation == pytest.approx(on_mesh.validation, rel=1e-5)

    def test_learning_rate_rises_then_falls_to_a_tenth(self):
        schedule = training.schedule(300)
        rates = [schedule(step) for step in range(301)]
        assert max(rates) == pytest.approx(1.0) and min(rates) > 0
        assert rates[-1] == pytest.approx(0.1)


class TestCommand:
    @pytest.mark.parametrize(("argv", "message"), [
        (["--mesh", "2by4"], "'2by4' is no mesh: write 2x4"),
        (["--mesh", "0x4"], "'0x4' is no mesh"),
        (["--steps", "0"], "'0' is no number of steps"),
        (["--mesh", "4x4"], "needs 16 devices, there are 8"),
        (["--mesh", "1x3"], r"(?s)768.*3|256.*3"),
    ])  # fmt: skip
    def test_what_it_cannot_do_is_said_in_a_line(self, argv, message, capsys):
        assert command.main(argv) == 2
        assert re.search(message, capsys.readouterr().err)

    def test_a_curve_without_matplotlib_is_refused_before_the_run(
        self, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
        assert main(["demo", "--out", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert f"matplotlib, which is not installed. Fix: {install_command('demo')}" in said
        assert list(tmp_path.iterdir()) == []

    def test_the_short_one_shows_what_the_full_one_does(self, short):
        """A short run proves as much, in a new process without matplotlib: `make demo`."""
        said, runs = short
        assert "mesh data=2, model=4 of 8 virtual CPU devices" in said
        assert re.search(r"as a JAX function: [\d.]+, agrees", said)
        assert "0 bytes copied between the frameworks" in said
        assert "isoshard demo --full trains" in said
        for run in runs:
            assert run.speed > 0 and run.validation_speed > 0

    def test_the_full_one_is_longer_and_larger(self):
        (short, small), (full, large) = command.SHORT, command.FULL
        assert (full.steps, large.layers, large.width) == (300, 4, 256)
        assert short.steps < full.steps and small.layers < large.layers

    def test_the_full_one_saves_curve_and_numbers(self, tmp_path, monkeypatch, capsys):
        learned = Run("PyTorch", [5.5, 4.5], 1.0, 100.0, 4.6, 400.0)
        evaluated = Run("JAX", validation=4.6)
        crossed = crossing.Crossing(evaluated, evaluated, 0, 8, 8)
        monkeypatch.setattr(command, "FULL", (Settings(batch=8, validation_batches=2), SMALL))
        monkeypatch.setattr(training, "train", lambda *_, **how: learned)
        monkeypatch.setattr(crossing, "cross", lambda *_: crossed)
        out = tmp_path / "new"
        assert main(["demo", "--full", "--steps", "2", "--mesh", "2x4", "--out", str(out)]) == 0
        assert "loss.png" in "".join(capsys.readouterr().out.split())  # a long path is wrapped
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
        content = json.loads((out / "demo.json").read_text())
        assert content["seconds"] > 0 and content["settings"]["steps"] == 2
        assert content["losses apart"] == 0 and content["buffers"] == content["shared"] == 8
        assert len(content["runs"][0]["losses"]) == 2
        assert content["runs"][1]["losses"] == [] and content["runs"][1]["validation"] > 0

    def test_frameworks_that_disagree_are_its_failure(self, monkeypatch, capsys):
        runs = [Run("PyTorch", [4.0], validation=4.0), Run("JAX", validation=4.1)]
        crossed = crossing.Crossing(runs[1], runs[0], 0, 8, 8)
        monkeypatch.setattr(command, "SHORT", (Settings(steps=1), SMALL))
        monkeypatch.setattr(training, "train", lambda *_, **how: runs[0])
        monkeypatch.setattr(crossing, "cross", lambda *_: crossed)
        assert main(["demo"]) == 1
        said = capsys.readouterr().out
        assert "as a JAX: 4.1000000, DIFFERS by more than 1e-05 (2.5e-02)" in said
