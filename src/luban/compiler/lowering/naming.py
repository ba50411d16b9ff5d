"""Names of kernels, made from what they do, so that a trace can be read."""

from __future__ import annotations

from luban.compiler.ir.graph import GroupOp

_DULL = {
    "constant",
    "yield",
    "extf",
    "truncf",
    "index",
    "dim",
    "index_cast",
    "extsi",
    "extui",
    "trunci",
    "select",
    "cmpi",
    "cmpf",
}
_SHORT = {
    "addf": "add",
    "subf": "sub",
    "mulf": "mul",
    "divf": "div",
    "addi": "add",
    "muli": "mul",
    "maximumf": "max",
    "minimumf": "min",
}
MAX_WORDS = 5


def kernel_name(group: GroupOp, number: int) -> str:
    """For example "k12_sum_exp_mul": a number, reductions first, then the scalar operations."""
    reductions: list[str] = []
    scalars: list[str] = []
    for op in group.body.block.ops:
        if op.name == "graph.reduce":
            reductions += [{"add": "sum"}.get(k.data, k.data) for k in op.properties["kinds"].data]  # type: ignore[union-attr]
        elif op.name not in ("graph.map", "graph.yield"):
            reductions.append(op.name.partition(".")[2])
        if op.regions:
            for inner in op.regions[0].block.ops:
                word = inner.name.partition(".")[2]
                if word not in _DULL:
                    scalars.append(_SHORT.get(word, word))
    words = list(dict.fromkeys(reductions)) + list(dict.fromkeys(scalars))
    return "_".join([f"k{number}", *(words[:MAX_WORDS] or ["copy"])])
