"""The map in CONTRIBUTING.md is true: a package imports only what stands above it, and no module is in a cycle."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "masterless"
MAP = re.findall(r"^    (\w+)/ ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
MODULES = sorted(SOURCE.rglob("*.py"))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _nodes(tree: ast.AST):
    """All nodes that run, functions included: an import inside a function hides a cycle and does not remove it."""
    for node in ast.iter_child_nodes(tree):
        if not _is_for_types(node):
            yield node
            yield from _nodes(node)


def _name(path: Path) -> str:
    return ".".join(["masterless", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


NAMES = {_name(path) for path in MODULES}


def _imports(path: Path) -> set[str]:
    """The modules of ours that a module imports by name."""
    package = ["masterless", *path.relative_to(SOURCE).parts[:-1]]
    found = set()
    for node in _nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            inner = {f"{module}.{alias.name}" for alias in node.names}
            found |= (inner & NAMES) or {module}
    return {name for name in found if name in NAMES and name != "masterless"}


def _package(name: str) -> str:
    return name.split(".")[1]


def test_the_map_names_every_package():
    assert set(MAP) == {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_package_imports_only_what_stands_above_it(path):
    inside = path.relative_to(SOURCE).parts
    if len(inside) == 1:  # the package itself and `python -m masterless` see everything
        return
    above = MAP[: MAP.index(inside[0]) + 1]
    wrong = [name for name in _imports(path) if _package(name) in MAP and _package(name) not in above]
    assert wrong == []


def test_no_module_is_in_a_cycle():
    graph = {_name(path): _imports(path) - {_name(path)} for path in MODULES}
    del graph["masterless"]  # it re-exports
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_files_can_be_read_in_one_sitting():
    long = {str(p.relative_to(ROOT)): n for p in MODULES if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}
