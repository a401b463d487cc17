"""Every promise of promises.md has a test, and these tests carry the mark."""

import ast
import re

import launch

ROWS = re.findall(r"^\| (.+) \| `(\w+)::(\w+)` \|$", (launch.TESTS / "promises.md").read_text(), re.MULTILINE)


def test_every_promise_leads_to_a_test_of_its_own():
    assert 60 <= len(ROWS) <= 90
    named = [(file, name) for _, file, name in ROWS]
    assert len(set(named)) == len(named) and len({promise for promise, _, _ in ROWS}) == len(ROWS)
    gone = []
    for file, name in named:
        paths = list(launch.TESTS.glob(f"*/{file}.py"))
        defined = [node.name for path in paths for node in ast.parse(path.read_text()).body if hasattr(node, "name")]
        gone += [] if name in defined else [f"{file}::{name}"]
    assert gone == [], "promises.md names these tests"


def test_every_line_of_the_tables_is_a_promise():
    lines = [line for line in (launch.TESTS / "promises.md").read_text().splitlines() if line.startswith("|")]
    heads = [line for line in lines if line in ("| promise | test |", "|---|---|")]
    assert len(lines) == len(heads) + len(ROWS) and len(heads) == 2 * 8


def test_promises_have_their_mark_and_no_other_test_has(request):
    """Among the tests of this session."""
    named = {f"{file}::{name}" for _, file, name in ROWS}
    for item in request.session.items:
        is_promise = f"{item.path.stem}::{item.name.partition('[')[0]}" in named
        assert is_promise == (item.get_closest_marker("promise") is not None), item.nodeid
