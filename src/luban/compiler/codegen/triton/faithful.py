"""Rewrites a kernel's source so that Triton's interpreter computes bfloat16 as chips do.

The interpreter multiplies bfloat16 operands of a dot as the integers that hold them (triton issue 11584), and it rounds
to bfloat16 towards zero. Products of bfloat16 are exact in float32, and rounding to nearest is integer arithmetic.
"""

from __future__ import annotations

import ast

_ROUND = '''
@triton.jit
def nearest_bfloat16(x):
    """x rounded to the nearest bfloat16, ties to even."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    rounded = tl.where(x != x, bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
    return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
'''


def faithful(source: str) -> str:
    """The source with every conversion to bfloat16 and every dot replaced; other sources stay as they are."""
    if "tl.bfloat16" not in source and "tl.dot" not in source:
        return source
    tree = _Rewrite().visit(ast.parse(source))
    first = next(i for i, node in enumerate(tree.body) if isinstance(node, ast.FunctionDef))
    tree.body[first:first] = ast.parse(_ROUND).body
    return ast.unparse(ast.fix_missing_locations(tree))


class _Rewrite(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        if node.func.attr == "to" and ast.unparse(node.args[0]) == "tl.bfloat16" and not node.keywords:
            return ast.Call(ast.Name("nearest_bfloat16", ast.Load()), [node.func.value], [])
        if ast.unparse(node.func) == "tl.dot" and not node.keywords:  # float32 and int8 dots have options
            node.args[:2] = [_to_float32(a) for a in node.args[:2]]
        return node


def _to_float32(operand: ast.expr) -> ast.expr:
    float32 = ast.Attribute(ast.Name("tl", ast.Load()), "float32", ast.Load())
    return ast.Call(ast.Attribute(operand, "to", ast.Load()), [float32], [])
