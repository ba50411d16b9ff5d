"""The house's order: imports go down only, `import luban` and --help stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import luban
from luban.cli.main import COMMANDS
from luban.recipes import RECIPES

SOURCE = Path(luban.__file__).parent
HEAVY = ("torch", "numpy", "llvmlite", "xdsl", "safetensors")

# From the top down; a package may import those of a later line, and its own.
LAYERS = [
    {"cli"},
    {"recipes", "bench"},
    {"studio", "analyzer", "migrate", "hub"},
    {"scheduler"},
    {"comm"},
    {"kernels", "sparsity"},
    {"compiler"},
    {"runtime"},
    {"targets"},
    {"events", "symbolic"},
    {"errors"},
]
RANK = {package: -i for i, layer in enumerate(LAYERS) for package in layer}

# What `from luban import NAME` or `luban.NAME` reaches, by package.
PUBLIC = {name: module.split(".")[1] for name, module in luban._NAMES.items()}


def imported(path: Path) -> set[str]:
    """The luban packages that a file imports, wherever in the file it does."""
    found = set()
    inside = path.relative_to(SOURCE.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name.split(".") for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = list(inside[: len(inside) - node.level + (path.name == "__init__.py")])
            names = [base + (node.module or "").split(".")]
        elif isinstance(node, ast.ImportFrom) and node.module == "luban":
            names = [["luban", PUBLIC.get(a.name, a.name)] for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")]
        else:
            continue
        found.update(parts[1] for parts in names if parts[0] == "luban" and len(parts) > 1)
    return found & set(RANK)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down_only(path):
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if package == "__init__":
        return
    assert package in RANK, f"add the package {package} to LAYERS"
    upward = {other for other in imported(path) if other != package and RANK[other] >= RANK[package]}
    assert not upward, f"{package} imports {sorted(upward)} from above or beside it"


def test_the_order_is_checked_and_not_just_stated(tmp_path, monkeypatch):
    """The parser sees imports in functions, `from luban import ...` and relative ones."""
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path / "luban")
    folder = tmp_path / "luban" / "runtime"
    folder.mkdir(parents=True)
    file = folder / "x.py"
    file.write_text(
        "def f():\n    from luban import train_step\n    from ..targets import a\n    import luban.kernels.gemm\n"
    )
    assert imported(file) == {"compiler", "targets", "kernels"}


def heavy_after(code: str) -> list[str]:
    """The heavy packages that are imported once `code` has run in a fresh process."""
    script = f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr.split()


def test_import_luban_is_light():
    assert heavy_after("import luban, luban.errors, luban.events, luban.symbolic; dir(luban); luban.ConfigError") == []


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), *(["train", recipe] for recipe in RECIPES)])
def test_help_is_light(command):
    code = f"from luban.cli.main import main\nassert main({[*command, '--help']!r}) == 0"
    assert heavy_after(code) == []


def test_unknown_public_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = luban.nonsense
    assert set(luban.__all__) <= set(dir(luban))
