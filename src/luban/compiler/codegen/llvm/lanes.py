"""What a target's vectors can do, and small pieces of vector code that several emitters share."""

from __future__ import annotations

from luban.compiler.codegen.llvm.context import Context
from luban.compiler.codegen.llvm.dots.flow import mangled
from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.codegen.llvm.values import BYTES, memory_type, vector_type
from luban.targets import Target

# Features whose vector instructions all take a mask, so that a masked tail costs no more than a full vector.
_FULL_MASKS = ("avx512vl", "sve", "v")
_WORD_MASKS = ("avx2",)  # masked loads and stores of 4- and 8-byte elements only


def features_of(target: Target) -> frozenset[str]:
    """Names of the LLVM features that the target switches on."""
    return frozenset(word[1:] for word in target.llvm_features.split(",") if word.startswith("+"))


def masks_are_cheap(target: Target) -> bool:
    """True where a tail is best done under a mask (AVX-512, SVE, RVV), False where it is best done one by one."""
    return not features_of(target).isdisjoint(_FULL_MASKS)


def loads_masked(target: Target, ty: str) -> bool:
    """True where a masked load of this element type is one instruction."""
    words = not features_of(target).isdisjoint(_WORD_MASKS)
    return masks_are_cheap(target) or (words and BYTES[memory_type(ty)] >= 4)


def gathers(target: Target, ty: str) -> bool:
    """True where a masked gather of this element type is one instruction."""
    names = features_of(target)
    return BYTES[memory_type(ty)] >= 4 and not names.isdisjoint(("avx512f", "sve", "v")) or "v" in names


def function_attributes(target: Target) -> str:
    """Attributes of every function: no unwinding, vectors as wide as the target says, and what the target adds."""
    words = ["nounwind"]
    if "avx512f" in features_of(target) and target.vector_bits == 512:
        words += ['"prefer-vector-width"="512"', '"min-legal-vector-width"="512"']
    if target.function_attributes:
        words.append(target.function_attributes)
    return " ".join(words)


def combined_mask(ctx: Context, explicit: list[str] | None) -> list[str] | None:
    """An operation's own mask (a part for each copy) and the loop's mask, both where there are both."""
    if explicit is None or ctx.masks is None:
        return explicit if ctx.masks is None else list(ctx.masks)
    ty = f"<{ctx.width} x i1>"
    return [ctx.fn.op(f"and {ty} {a}, {b}") for a, b in zip(explicit, ctx.masks, strict=True)]


def any_lane(fn: Function, width: int, mask: str) -> str:
    """True where at least one lane of the mask is."""
    if width == 1:
        return mask
    return fn.intrinsic(f"llvm.vector.reduce.or.v{width}i1", "i1", [(f"<{width} x i1>", mask)])


def any_of_parts(ctx: Context, masks: list[str]) -> str:
    """True where at least one lane of any copy is."""
    found = masks[0]
    ty = "i1" if ctx.width == 1 else f"<{ctx.width} x i1>"
    for mask in masks[1:]:
        found = ctx.fn.op(f"or {ty} {found}, {mask}")
    return any_lane(ctx.fn, ctx.width, found)


def gather(fn: Function, width: int, ty: str, pointers: str, mask: str) -> str:
    """Elements at a vector of pointers where the mask is true, zeros elsewhere."""
    vector, pointer_vector = f"<{width} x {ty}>", f"<{width} x ptr>"
    name = f"llvm.masked.gather.{mangled(width, ty)}.v{width}p0"
    listed = [(pointer_vector, f"align {BYTES[ty]} {pointers}"), (f"<{width} x i1>", mask), (vector, "zeroinitializer")]
    callee = fn.module.declare(name, vector, [pointer_vector, f"<{width} x i1>", vector])
    return fn.call(vector, callee, listed)


def scatter(fn: Function, width: int, ty: str, value: str, pointers: str, mask: str) -> None:
    """Stores lanes to a vector of pointers where the mask is true, in the order of lanes."""
    vector, pointer_vector = f"<{width} x {ty}>", f"<{width} x ptr>"
    name = f"llvm.masked.scatter.{mangled(width, ty)}.v{width}p0"
    listed = [(vector, value), (pointer_vector, f"align {BYTES[ty]} {pointers}"), (f"<{width} x i1>", mask)]
    callee = fn.module.declare(name, "void", [vector, pointer_vector, f"<{width} x i1>"])
    fn.call("void", callee, listed)


def shuffle(fn: Function, width: int, ty: str, first: str, second: str, order: list[int]) -> str:
    """Lanes picked from two vectors of `width`."""
    vector = vector_type(ty, width)
    listed = ", ".join(f"i32 {lane}" for lane in order)
    return fn.op(f"shufflevector {vector} {first}, {vector} {second}, <{len(order)} x i32> <{listed}>")


def reverse(fn: Function, width: int, ty: str, value: str) -> str:
    """The lanes in the opposite order."""
    return shuffle(fn, width, ty, value, "poison", list(range(width))[::-1])
