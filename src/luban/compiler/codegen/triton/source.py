"""Puts a file together: header, helper functions, entries, and `launch`."""

from __future__ import annotations

from collections.abc import Sequence

from luban.compiler.codegen.triton.expressions import dim_text
from luban.compiler.codegen.triton.helpers import helper_source
from luban.compiler.codegen.triton.kernel import Argument, Entry
from luban.symbolic import Dim

_HEAD = '''"""{name}: a Luban tile kernel in the Triton that versions 3.0 to 3.6 share.

{takes}
"""

{torch}import triton
import triton.language as tl
'''


def assemble(
    name: str, arguments: Sequence[Argument], entries: Sequence[Entry], bodies: Sequence[list[str]], helpers: set[str]
) -> str:
    """The text of a kernel's file."""
    buffers = [a for a in arguments if a.kind == "buffer"]
    takes = "\n".join(
        f"    {a.name}: a flat tensor of {a.dtype.removeprefix('tl.')}"
        if a.kind == "buffer"
        else f"    {a.name}: a size"
        for a in arguments
        if a.kind in ("buffer", "symbol")
    )
    own = any(a.kind in ("workspace", "status") for a in arguments)
    text = _HEAD.format(name=name, takes=f"Call launch with\n{takes}", torch="import torch\n" if own else "")
    text += helper_source(helpers)
    for number, (entry, lines) in enumerate(zip(entries, bodies, strict=True)):
        what = f"Phase {number + 1} of {len(entries)}" if len(entries) > 1 else "The whole kernel"
        text += f"\n\n@triton.jit\ndef {entry.name}({', '.join(entry.arguments)}):\n"
        text += f'    """{what}; grid {_grid_text(entry)}."""\n' + "\n".join(lines) + "\n"
    return text + "\n\n" + _launch(arguments, entries, buffers)


def _grid_text(entry: Entry) -> str:
    return "(" + ", ".join(dim_text(d, False) for d in entry.grid) + ("," if len(entry.grid) == 1 else "") + ")"


def _launch(arguments: Sequence[Argument], entries: Sequence[Entry], buffers: Sequence[Argument]) -> str:
    names = [a.name for a in arguments if a.kind in ("buffer", "symbol")]
    failing = any(a.kind == "status" for a in arguments)
    lines = [
        f"def launch({', '.join(names)}):",
        f'    """Runs the kernel{"; True when every index was in range" if failing else ""}."""',
    ]
    for a in arguments:
        if a.kind in ("workspace", "status"):
            made = f"torch.{'zeros' if a.kind == 'status' else 'empty'}({dim_text(a.elements, False)}"
            lines.append(f"    {a.name} = {made}, dtype={_torch(a.dtype)}, device={buffers[0].name}.device)")
    for entry in entries:
        call = f"{entry.name}[{_grid_text(entry)}]({', '.join(entry.arguments)}, num_warps={entry.warps})"
        guards = [f"{dim_text(d, False)} > 0" for d in entry.grid if not isinstance(d, int)]
        if _empty(entry.grid):
            continue
        lines += [f"    if {' and '.join(guards)}:", f"        {call}"] if guards else [f"    {call}"]
    if failing:
        lines.append("    return status.item() == 0")
    return "\n".join(lines if len(lines) > 2 else [*lines, "    return None"]) + "\n"


def _empty(grid: tuple[Dim, ...]) -> bool:
    return any(isinstance(d, int) and d <= 0 for d in grid)


def _torch(dtype: str) -> str:
    name = dtype.removeprefix("tl.")
    return "torch.bool" if name == "int1" else f"torch.{name}"
