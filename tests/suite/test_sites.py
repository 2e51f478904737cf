"""The changes that make mutants (tools/suite/sites.py)."""

import pytest

from tools.suite.sites import changed, is_program, sites

CASES = {
    "return a + b": {"return None", "return a - b"},
    "return (a) <= (b)": {"return None", "return (a) < (b)"},
    "return a is not b": {"return None", "return a is b"},
    "return a not in b": {"return None", "return a in b"},
    "return 'é' and b": {"return None", "return 'é' or b"},
    "return [x for x in a if x]": {"return None", "return [x for x in a if not (x)]"},
    "return f(a, key=b)": {"return None", "return f(a, **{})"},
    "a.b = 3": {"pass", "a.b = 4"},
    "a += 1": {"pass", "a += 2"},
    "a(b)": {"pass"},
    "raise ValueError(f'{a + 1}')": set(),
    "'a' 'docstring'": set(),
    "a: 3 = None": set(),
    "return not a": {"return None", "return (a)"},
}


@pytest.mark.parametrize("line", CASES)
def test_each_change_of_a_line(line):
    source = f"N = 1 + 1\n\n\n@f(1)\ndef é(a, b=2 + 2):\n    {line}\n"
    found = sites(source)
    mutants = {changed(source, site) for site in found}
    assert mutants == {source.replace(line, new) for new in CASES[line]}
    assert all(map(is_program, mutants))


def test_sites_of_one_kind_are_told_by_their_place():
    source = "class C:\n    n = 1\n\n    def f(self):\n        return lambda: (1, 2)\n"
    numbers = [site for site in sites(source) if site.kind == "constant"]
    assert [(site.function, site.ordinal, site.old) for site in numbers] == [
        ("C.f", 0, "1"),
        ("C.f", 1, "2"),
    ]


def test_a_change_that_is_no_program():
    source = "def f(a):\n    return g(key=1, *a)\n"
    [keyword] = [site for site in sites(source) if site.kind == "keyword"]
    assert not is_program(changed(source, keyword))
