"""Documentation is run: a page's Python blocks and its shell blocks marked `sh run`, in order, in an empty folder.

A block ```text output``` after one of them is what it prints; `...` in it stands for anything. One process a page.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUNNABLE = ("python", "sh run")
_ALLOWED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, text and first line in the page."""

    info: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(m[1].strip(), m[2], text.count("\n", 0, m.start()) + 2) for m in _BLOCK.finditer(text)]


def runnable(page: Path) -> bool:
    return any(b.info in _RUNNABLE for b in blocks(page))


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=lambda p: str(p.relative_to(DOCS)))
def test_a_page_does_what_it_says(page, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {
        **os.environ,
        "PATH": path,
        "LUBAN_CACHE_DIR": str(tmp_path / "cache"),
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "empty").mkdir()
    command = [sys.executable, __file__, str(page)]
    done = subprocess.run(command, cwd=tmp_path / "empty", env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_can_be_reached_from_the_index():
    found, left = set(), [DOCS / "index.md"]
    while left:
        page = left.pop()
        if page in found:
            continue
        found.add(page)
        targets = re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", page.read_text())
        left += [(page.parent / t).resolve() for t in targets if "://" not in t]
    assert {p for p in PAGES if "decisions" not in p.parts} <= found


def test_the_reference_is_that_of_the_operations():
    from luban.compiler.ir.reference import reference

    assert (DOCS / "reference" / "ir.md").read_text() == reference(), "run python -m luban.compiler.ir.reference"


def run_page(page: Path) -> None:
    """Runs a page in this process and folder; raises at the first block that fails or prints something else."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = None
    for block in blocks(page):
        if block.info == "python":
            printed = _python(block, page, namespace)
        elif block.info == "sh run":
            printed = _shell(block, page)
        elif block.info == "text output":
            assert printed is not None, f"{page}:{block.line}: nothing was run that could print this"
            same = doctest.OutputChecker().check_output(block.text, printed, _ALLOWED)
            assert same, f"{page}:{block.line}: said\n{block.text}\nbut printed\n{printed}"


def _python(block: Block, page: Path, namespace: dict[str, object]) -> str:
    out = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with contextlib.redirect_stdout(out):
        exec(code, namespace)
    return out.getvalue()


def _shell(block: Block, page: Path) -> str:
    done = subprocess.run(["bash", "-ec", block.text], capture_output=True, text=True)
    assert done.returncode == 0, f"{page}:{block.line}: exit code {done.returncode}\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
