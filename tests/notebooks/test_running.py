import nbformat
import pytest

from examples.notebooks import __main__ as command
from examples.notebooks import running


def notebook(*sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


def test_cells_run_in_one_process_beside_the_pictures_and_far_from_files():
    program = (
        "import importlib.util, os, sys",
        "print(os.listdir(), importlib.util.find_spec('pictures') is not None)",
        "os.environ['JAX_PLATFORMS'], sys.argv[0].endswith('ipykernel_launcher.py')",
        "!python -c 'import sys; print(sys.prefix)'\nprint(sys.prefix)",
    )
    given = notebook(*program)
    computed = running.run(given, seconds=60)
    assert [cell.outputs for cell in given.cells] == [[]] * 4
    assert [cell.execution_count for cell in computed.cells] == [1, 2, 3, 4]
    assert computed.cells[1].outputs[0].text == "[] True\n"
    assert computed.cells[2].outputs[0].data["text/plain"] == "('cpu', True)"
    shell, kernel = computed.cells[3].outputs[0].text.split()
    assert shell == kernel
    assert all(not cell.metadata for cell in computed.cells)


def test_an_error_names_its_cell():
    with pytest.raises(running.NotebookError, match=r"(?s)^cell 2 raised\n.*ValueError: no way$"):
        running.run(notebook("1", "raise ValueError('no way')", "2"), seconds=60)


def test_time_is_for_the_whole_notebook():
    nap = "import time; time.sleep(2)"
    with pytest.raises(running.NotebookError, match=r"cell \d was running when 3 s were over"):
        running.run(notebook(*[nap] * 4), seconds=3)


def test_a_process_that_ends_is_told():
    with pytest.raises(running.NotebookError, match="cell 1 ended the process"):
        running.run(notebook("import os; os._exit(3)"), seconds=60)


def test_the_command_keeps_and_compares(tmp_path, capsys):
    path = tmp_path / "tiny.ipynb"
    running.write(path, notebook("print(6 * 7)"))
    assert command.main(["tiny"], tmp_path) == 1
    assert "cell 1 keeps nothing, computed stdout" in capsys.readouterr().out
    assert command.main(["--write"], tmp_path) == 0
    assert "tiny: 1 cells in" in capsys.readouterr().out
    assert command.main([], tmp_path) == 0
    assert capsys.readouterr().out.endswith("as kept\n")
    assert running.read(path).metadata == running.METADATA


def test_the_command_refuses_what_it_does_not_know(tmp_path, capsys):
    running.write(tmp_path / "tiny.ipynb", notebook())
    assert command.main(["other"], tmp_path) == 2
    assert capsys.readouterr().out == "there is no notebook other; there are tiny\n"


def test_nothing_of_the_machine_is_kept(tmp_path):
    path = tmp_path / "tiny.ipynb"
    running.write(path, notebook("object()"))
    assert command.main(["--write"], tmp_path) == 1
    assert running.read(path).cells[0].outputs == []
