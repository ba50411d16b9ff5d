"""tile.pack: calls of the packing functions of `dots`, one a module for each kind."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.context import Context, buffer_of, dim_value, emits, uniform_of
from luban.compiler.codegen.llvm.dots import PackSpec, emit_pack
from luban.compiler.codegen.llvm.lanes import features_of, function_attributes, loads_masked
from luban.compiler.codegen.llvm.values import register_type


@emits("tile.pack")
def _pack(ctx: Context, op: Any) -> None:
    source, target = buffer_of(ctx, op.source), buffer_of(ctx, op.target)
    base, outer, k = (uniform_of(ctx, value, "an operand of tile.pack") for value in (op.base, op.outer, op.k))
    strides = [dim_value(ctx, stride) for stride in op.strides.data]
    contiguous = "k" if strides[1].number == 1 else "rows" if strides[0].number == 1 else "none"
    wide = target.type == "double"
    spec = PackSpec(
        panel=op.panel.data,
        group=op.kk.data,
        contiguous=contiguous,
        src_type=source.type,
        dst_type=target.type,
        lanes=max(1, ctx.target.vector_bits // (64 if wide else 32)),
        masked=loads_masked(ctx.target, source.type),
        native_bf16=not features_of(ctx.target).isdisjoint(("avx512bf16", "bf16")),
        k_multiple=op.padding,
        parts=op.parts_of,
        unsigned=op.unsigned is not None,
    )
    words = ["-".join(field) if isinstance(field, tuple) else str(field).lower() for field in vars(spec).values()]
    name = "luban.pack." + ".".join(words)
    if name not in ctx.module.functions:
        emit_pack(ctx.module, name, spec, function_attributes(ctx.target))
    start = ctx.fn.op(f"getelementptr {register_type(source.type)}, ptr {source.pointer}, i64 {base.text}")
    place = target.pointer
    if op.target_base is not None:
        first = uniform_of(ctx, op.target_base, "an operand of tile.pack")
        place = ctx.fn.op(f"getelementptr {register_type(target.type)}, ptr {place}, i64 {first.text}")
    arguments = [("ptr", start), *(("i64", stride.text) for stride in strides), ("ptr", place)]
    ctx.fn.call("void", f"@{name}", [*arguments, ("i64", outer.text), ("i64", k.text)])
