"""`isoshard plan`: what it asks of the planner, what it prints and writes, what it refuses."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest

from isoshard import Plan, planner
from isoshard.cli import main
from isoshard.core.errors import CaptureError
from isoshard.planner.cli.plan_strategies import PlanCommandError, axes_of, bytes_of, plan_of
from isoshard.planner.reports.comparison import comparison_from_json
from isoshard.planner.reports.report import Report
from tests.planner.reports.sample_reports import fitting, too_large

SCRIPT = """
import jax
import isoshard as iso

def step(x):
    return x * 2

def other(x, y=1):
    return x

def pair(x, y):
    return x

def make_args():
    return jax.ShapeDtypeStruct((8, 4), "float32"), 3

def of_mesh(mesh):
    return iso.Plan.fsdp(mesh.axis_names[0])

my_plan = iso.Plan({"*": None})
example_args = (jax.ShapeDtypeStruct((8,), "float32"),)
alone = 5

if __name__ == "__main__":
    raise RuntimeError("run")
"""


@dataclasses.dataclass
class Found:
    """What the search finds, as far as the command reads it."""

    mesh: jax.sharding.Mesh
    plan: Plan

    def __str__(self):
        return "found this, not [that]"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.fixture
def calls(monkeypatch):
    """What the planner is asked for; it answers with reports put together by hand."""
    asked = []

    def estimate(step, args, mesh, plan=None, *, depth="trace", memory=None, timeout=None):
        asked.append((step, args, mesh, plan, depth, memory, timeout))
        is_large = isinstance(plan, Plan) and plan == Plan.data_parallel("data")
        return (too_large if is_large else fitting)(step=step.__name__, mesh=dict(mesh.shape))

    def search(step, args, where, *, memory=None, depth="trace"):
        asked.append((step, args, where, "search", depth, memory, None))
        mesh = where if isinstance(where, jax.sharding.Mesh) else where.mesh((4, 4), ("x", "y"))
        return Found(mesh, Plan.fsdp("x"))

    monkeypatch.setitem(vars(planner), "estimate", estimate)
    monkeypatch.setitem(vars(planner), "search", search)
    return asked


def run(*words):
    return main(["plan", *words])


class TestWhatIsAsked:
    def test_a_step_with_words(self, script, calls, capsys):
        status = run("train.py:step", "--mesh", "v5e:16x16", "--plan", "fsdp,tensor")
        assert status == 0
        [(step, args, mesh, plan, depth, memory, timeout)] = calls
        assert (step.__name__, args[0].shape) == ("step", (8,))
        assert dict(mesh.shape) == {"data": 16, "model": 16}
        tensor = Plan.fsdp("data") * Plan.tensor_parallel("model")
        assert plan == tensor * Plan.batch_activations("data")
        assert (depth, memory, timeout) == ("trace", None, None)
        assert capsys.readouterr().out.startswith("step (torch) on v5e:16x16: data=16 x model=16")

    def test_options(self, script, calls):
        run(
            "train.py:other", "--mesh", "h100:4x8", "--axes", "a=4,b", "--args",
            "train.py:make_args", "--depth", "partition", "--memory", "40GiB", "--timeout", "9",
            "--plan", "fsdp=a+b",
        )  # fmt: skip
        [(step, args, mesh, plan, depth, memory, timeout)] = calls
        assert step.__name__ == "other" and args[1] == 3
        assert dict(mesh.shape) == {"a": 4, "b": 8}
        assert plan == Plan.fsdp(("a", "b"))
        assert (depth, memory, timeout) == ("partition", 40 << 30, 9.0)

    def test_plans_of_a_script(self, script, calls):
        run("train.py:step", "--mesh", "v5e:4x4", "--plan", "train.py:my_plan")
        run("train.py:step", "--mesh", "v5e:4x4", "--plan", "train.py:of_mesh")
        assert [call[3] for call in calls] == [Plan({"*": None}), Plan.fsdp("data")]

    def test_arguments_of_the_step_itself(self, script, calls):
        script.write_text(SCRIPT + "pair.example_args = lambda: (1, 2)\n")
        run(f"{script}:pair", "--mesh", "cpu:8")
        assert calls[0][1] == (1, 2)

    def test_no_plan(self, script, calls):
        run("train.py:step", "--mesh", "cpu:8")
        assert calls[0][3] is None and dict(calls[0][2].shape) == {"data": 8}

    def test_auto(self, script, calls, capsys):
        words = ("train.py:step", "--mesh", "v5e:4x4", "--plan", "auto", "--depth", "compile")
        assert run(*words, "--memory", "8GB") == 0
        assert calls[0][2:6] == (planner.topology("v5e:4x4"), "search", "partition", 8_000_000_000)
        assert calls[1][3:5] == (Plan.fsdp("x"), "compile")
        assert dict(calls[1][2].shape) == {"x": 4, "y": 4}
        assert capsys.readouterr().out.endswith("\nfound this, not [that]\n")


class TestWhatIsGiven:
    def test_files(self, script, calls):
        run("train.py:step", "--mesh", "cpu:8", "--html", "a.html", "--json", "a.json")
        folder = script.parent
        assert (folder / "a.html").read_text().startswith("<!DOCTYPE html>")
        assert Report.from_json((folder / "a.json").read_text()).step == "step"

    def test_several_plans(self, script, calls, capsys):
        words = ("--plan", "data", "--plan", "fsdp", "--html", "a.html", "--json", "a.json")
        assert run("train.py:step", "--mesh", "v5e:4x4", *words) == 0
        out = capsys.readouterr().out
        assert "data does not fit, by 55.5 GiB. Of those that fit, fsdp is fastest" in out
        both = comparison_from_json((script.parent / "a.json").read_text())
        assert list(both.reports) == ["data", "fsdp"]
        page = (script.parent / "a.html").read_text()
        assert page.count('<div class="isoshard-report">') == 3

    def test_what_does_not_fit(self, script, calls, capsys):
        assert run("train.py:step", "--mesh", "v5e:4x4", "--plan", "data") == 1
        said = capsys.readouterr()
        assert said.err.endswith("isoshard plan: does not fit, by 55.5 GiB a device\n")
        assert "does not fit, 130.0 GiB is 55.5 GiB over" in said.out

    def test_width(self, script, calls, capsys):
        run("train.py:step", "--mesh", "cpu:8", "--width", "40")
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 40

    def test_chips_and_targets(self, capsys):
        assert run("--list", "--width", "100") == 0
        out = capsys.readouterr().out
        assert "v5e:16x16" in out and "h100:2x8" in out
        assert "depth trace: every machine\npartition (this host): jax " in out
        assert "compile for TPU: " in out and "compile for GPU: " in out


STEP = ("train.py:step", "--mesh", "cpu:8")
BAD = [
    ((), "--mesh is missing: give a machine, such as --mesh v5e:16x16"),
    (("--mesh", "cpu:8"), "the step is missing: give script.py:step, or --hf config.json"),
    (("train.py:step", "--mesh", "v9:2"), "there is no chip 'v9'; there are"),
    (("train.py:step", "--mesh", "v5e:3x3"), "there is no slice of 3x3 v5e"),
    (("none.py:step", "--mesh", "cpu:8"), "there is no file 'none.py'"),
    (("nothing.here:step", "--mesh", "cpu:8"), "there is no module 'nothing.here'"),
    (("train.py", "--mesh", "cpu:8"), "'train.py' does not name the step: write script.py:name"),
    (("train.py:stp", "--mesh", "cpu:8"), "train.py has no 'stp'; it has step, other, pair"),
    (("train.py:alone", "--mesh", "cpu:8"), "train.py:alone is of type int, and not a step"),
    ((*STEP, "--axes", "a=9"), "--axes 'a=9' has 9 devices, and"),
    ((*STEP, "--axes", "a;b"), "write each axis once with its"),
    ((*STEP, "--memory", "lots"), "write a size such as 16GB"),
    ((*STEP, "--memory", "0GB"), "a device needs memory"),
    ((*STEP, "--plan", "fdsp"), "'fdsp', did you mean 'fsdp'? There are data, fsdp, tensor"),
    ((*STEP, "--axes", "x=8", "--plan", "fsdp,tensor"), "fsdp and tensor both take axis 'x' of x"),
    ((*STEP, "--plan", "fsdp=z"), "the mesh has no axis 'z'; its axes are data"),
    ((*STEP, "--plan", "train.py:alone"), "train.py:alone is of type int, and not a Plan"),
    ((*STEP, "--plan", "fsdp", "--plan", "fsdp"), "--plan fsdp is repeated"),
    ((*STEP, "--batch", "3"), "--batch needs --hf"),
    ((*STEP, "--hf", "c.json"), "give either script.py:step or"),
    (("--hf", "c.json", "--mesh", "cpu:8"), "there is no file 'c.json'"),
    ((*STEP, "--json", "none/a.json"), "none/a.json cannot be written: its folder does not exist"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_what_cannot_be_planned(script, calls, capsys, words, message):
    assert run(*words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("isoshard plan: ")
    assert message in said.err
    assert not calls and not said.out


def test_a_step_without_arguments_says_how_to_give_some(script, calls, capsys):
    script.write_text(SCRIPT.replace("example_args =", "others ="))
    assert run("train.py:pair", "--mesh", "cpu:8") == 2
    assert "train.py:pair takes x, y, and there are no example arguments" in capsys.readouterr().err
    assert "--args train.py:make_args" in run_error(capsys, "train.py:other", "--mesh", "cpu:8")


def run_error(capsys, *words):
    assert run(*words) == 2
    return capsys.readouterr().err


def test_a_script_that_fails(script, calls, capsys):
    script.write_text("import jax\n\nundefined\n")
    assert run_error(capsys, *STEP) == (
        "isoshard plan: importing train.py fails: NameError: name 'undefined' is not defined "
        "(train.py:3)\n"
    )


@pytest.mark.parametrize("seconds", ["0", "nan", "soon"])
def test_a_time_that_is_none(script, calls, capsys, seconds):
    with pytest.raises(SystemExit) as ended:
        run("train.py:step", "--mesh", "cpu:8", "--timeout", seconds)
    assert ended.value.code == 2 and not calls
    assert f"--timeout: needs seconds, more than 0, not '{seconds}'" in capsys.readouterr().err


def test_errors_of_the_planner_are_said(script, monkeypatch, capsys):
    def fails(*args, **options):
        raise CaptureError("train.py:5: a compiled step needs the value of a tensor")

    monkeypatch.setitem(vars(planner), "estimate", fails)
    assert "train.py:5: a compiled step needs the value" in run_error(capsys, *STEP)


def test_errors_of_others_keep_their_traceback(script, monkeypatch):
    def fails(*args, **options):
        raise ZeroDivisionError("a fault")

    monkeypatch.setitem(vars(planner), "estimate", fails)
    with pytest.raises(ZeroDivisionError, match="a fault"):
        run("train.py:step", "--mesh", "cpu:8")


def test_a_step_that_fails_says_at_which_line_of_the_script(script, capsys):
    script.write_text(SCRIPT.replace("return x * 2", "y = x.T\n    return x @ x @ y"))
    words = ("train.py:step", "--mesh", "cpu:8", "--args", "train.py:table")
    script.write_text(script.read_text() + "\ntable = jax.ShapeDtypeStruct((8, 4), 'float32')\n")
    said = run_error(capsys, *words)
    assert said.startswith("isoshard plan: step fails when it is traced, at train.py:7 (step): ")
    assert "TypeError: dot_general requires contracting dimensions" in said


def test_arguments_that_the_step_does_not_take(script, calls, capsys):
    words = ("train.py:step", "--mesh", "cpu:8", "--args", "train.py:make_args")
    assert run_error(capsys, *words) == (
        "isoshard plan: train.py:step takes (x), and train.py:make_args returns (ShapeDtypeStruct, "
        "int): too many positional arguments. Several arguments are a tuple\n"
    )
    assert "missing a required argument: 'y'" in run_error(
        capsys, "train.py:pair", "--mesh", "cpu:8"
    )
    assert not calls


def test_an_error_of_a_plan_says_of_which(script, capsys):
    script.write_text(SCRIPT.replace("return x * 2", "return x * 2, x.sum()"))
    script.write_text(script.read_text().replace("(8,), ", "(1024, 1024), "))
    said = run_error(capsys, "train.py:step", "--mesh", "cpu:8", "--plan", "tensor")
    assert said.startswith("isoshard plan: --plan tensor: 1 leaf larger than 1.0 MiB matches no")


def test_a_file_that_cannot_be_written(script, calls, capsys):
    (script.parent / "folder").mkdir()
    said = run_error(capsys, *STEP, "--json", "folder")
    assert "folder cannot be written: Is a directory" in said


def test_a_script_with_the_name_of_a_module(script, calls):
    (script.parent / "json.py").write_text(SCRIPT)
    assert run("json.py:step", "--mesh", "cpu:8") == 0
    assert sys.modules["json"] is json
    assert str(script.parent) not in sys.path


AXES = {"data": 4, "model": 2}


class TestWords:
    @pytest.mark.parametrize(
        ("text", "plan"),
        [
            ("data", Plan.data_parallel("data")),
            ("fsdp", Plan.fsdp("data")),
            ("tensor", Plan.tensor_parallel("model")),
            ("data,fsdp", Plan.fsdp("data")),
            (
                "data,tensor,sequence",
                Plan.data_parallel("data")
                * Plan.tensor_parallel("model")
                * Plan.sequence_parallel("model")
                * Plan.batch_activations("data"),
            ),
            (
                "fsdp,expert",
                Plan.fsdp("data") * Plan.expert_parallel("model") * Plan.batch_activations("data"),
            ),
        ],
    )
    def test_plans(self, text, plan):
        assert plan_of(text, AXES) == plan

    def test_axes_by_name_before_place(self):
        axes = {"tp": 2, "replica": 2, "fsdp": 2}
        plan = Plan.data_parallel("replica") * Plan.fsdp("fsdp") * Plan.tensor_parallel("tp")
        assert plan_of("data,fsdp,tensor", axes) == plan * Plan.batch_activations(
            ("replica", "fsdp")
        )

    def test_packed_weights(self):
        assert plan_of("tensor", AXES, "in_out") == Plan.tensor_parallel("model", weights="in_out")

    @pytest.mark.parametrize(("text", "machine", "words", "axes"), [
        (None, "v5e:16x16", None, {"data": 256}),
        (None, "v5e:16x16", "fsdp", {"data": 256}),
        (None, "v5e:16x16", "fsdp,tensor", {"data": 16, "model": 16}),
        (None, "v5p:8x8x8", "tensor", {"data": 64, "model": 8}),
        (None, "v5e:2*16x16", "data,expert", {"data": 32, "model": 16}),
        (None, "cpu:64", "fsdp,tensor", {"data": 8, "model": 8}),
        (None, "cpu:8", "fsdp,tensor", {"data": 2, "model": 4}),
        (None, "cpu:1", "fsdp,tensor", {"data": 1}),
        ("a=2,b,c=4", "cpu:64", None, {"a": 2, "b": 8, "c": 4}),
        ("a", "cpu:64", None, {"a": 64}),
        ("a=2", "cpu:64", None, {"a": 2}),
    ])  # fmt: skip
    def test_axes(self, text, machine, words, axes):
        assert axes_of(text, planner.topology(machine), words) == axes

    @pytest.mark.parametrize("text", ["a,b", "a=2,a=4", "a=0", "a=", "=2", "", "a=3,b"])
    def test_axes_that_are_none(self, text):
        with pytest.raises(PlanCommandError, match="--axes"):
            axes_of(text, planner.topology("cpu:64"), None)

    def test_sizes(self):
        assert [bytes_of(text) for text in ("5", "2kb", "3 MiB", "1.5G")] == (
            [5, 2000, 3 << 20, 1_500_000_000]
        )
        for text in ("", "GB", "-1GB", "1 parsec", "1iB"):
            with pytest.raises(PlanCommandError, match="write a size such as"):
                bytes_of(text)


def test_the_facade_is_loaded_when_it_is_named():
    program = (
        "import sys, isoshard as iso\n"
        "assert not [name for name in sys.modules if 'planner' in name]\n"
        "iso.planner.topology('v5e:4x4')\n"
        "assert 'isoshard.planner.reports.report' not in sys.modules\n"
        "assert 'rich.table' not in sys.modules\n"
        "assert set(iso.planner.__all__) <= set(dir(iso.planner))\n"
        "try: iso.planner.estimat\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "module 'isoshard.planner' has no attribute 'estimat'\n", done.stderr


def test_every_name_of_the_facade_is_there():
    for name in planner.__all__:
        assert getattr(planner, name).__module__.startswith("isoshard.planner.")
