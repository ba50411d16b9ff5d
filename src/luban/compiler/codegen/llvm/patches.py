"""tile.patches: calls of the copying functions of `dots.patches`, one a module for each geometry."""

from __future__ import annotations

import hashlib
from typing import Any

from luban.compiler.codegen.llvm.context import Context, buffer_of, emits, uniform_of
from luban.compiler.codegen.llvm.dots.patches import PatchSpec, emit_patches
from luban.compiler.codegen.llvm.lanes import function_attributes
from luban.compiler.codegen.llvm.values import register_type
from luban.compiler.ir.window import window_of
from luban.errors import ConfigError


@emits("tile.patches")
def _patches(ctx: Context, op: Any) -> None:
    source, target = buffer_of(ctx, op.source), buffer_of(ctx, op.target)
    if source.type != target.type:
        raise ConfigError(f"tile.patches copies {source.type} into {target.type}; convert the image first")
    spec = PatchSpec(
        type=source.type,
        lanes=max(1, ctx.target.vector_bits // (64 if source.type == "double" else 32)),
        points=op.points.data if len(op.points.data) == 1 else (0, *op.points.data[1:]),
        point_strides=op.point_strides.data,
        taps=op.taps.data,
        tap_strides=op.tap_strides.data,
        window=window_of(op.window),
        panel=op.panel.data,
    )
    name = "luban.patches." + hashlib.sha256(repr(spec).encode()).hexdigest()[:16]
    if name not in ctx.module.functions:
        emit_patches(ctx.module, name, spec, function_attributes(ctx.target))
    base, first, count = (uniform_of(ctx, v, "an operand of tile.patches") for v in (op.base, op.first, op.count))
    start = ctx.fn.op(f"getelementptr {register_type(source.type)}, ptr {source.pointer}, i64 {base.text}")
    listed = [("ptr", start), ("i64", first.text), ("i64", count.text), ("ptr", target.pointer)]
    ctx.fn.call("void", f"@{name}", listed)
