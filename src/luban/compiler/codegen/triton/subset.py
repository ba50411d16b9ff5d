"""A static check that generated source stays within the Triton that all vendors' compilers share (3.0 to 3.6)."""

from __future__ import annotations

import ast

from luban.errors import ConfigError

_UNARY = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "abs")
# Functions of triton.language with the keywords that may be given by name.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "program_id": (), "arange": (), "zeros": (), "full": (), "broadcast_to": (), "where": (), "load": ("mask", "other"),
    "store": ("mask",), "maximum": ("propagate_nan",), "minimum": ("propagate_nan",),
    "sum": ("axis",),
    "max": ("axis",), "min": ("axis",), "reduce": (), "dot": ("input_precision", "out_dtype"), "philox": (),
    "debug_barrier": (),
    "static_range": (), "atomic_add": ("mask",), "atomic_max": ("mask",), "atomic_min": ("mask",),
    "atomic_and": ("mask",), "atomic_or": ("mask",), **dict.fromkeys(_UNARY, ()),
}  # fmt: skip
TYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "int1", "uint64", "uint32",
    "uint16", "uint8",
)  # fmt: skip
OTHER = ("PropagateNan",)
METHODS: dict[str, tuple[str, ...]] = {"to": ("bitcast",)}
_MODULES = ("torch", "triton", "triton.language")
_BUILTINS = ("range", "float")


def check_subset(source: str) -> None:
    """Raises ConfigError naming the line and what it uses that some of the versions lack."""
    tree = ast.parse(source)
    helpers = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Import):
            _allow(all(a.name in _MODULES for a in node.names), node, f"import {node.names[0].name}")
        elif isinstance(node, ast.FunctionDef):
            if any(ast.unparse(d) == "triton.jit" for d in node.decorator_list):
                _check_function(node, helpers)
        else:
            _allow(isinstance(node, ast.Expr), node, type(node).__name__)


def _check_function(function: ast.FunctionDef, helpers: set[str]) -> None:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl":
            _allow(node.attr in FUNCTIONS or node.attr in TYPES or node.attr in OTHER, node, f"tl.{node.attr}")
        elif isinstance(node, ast.Call):
            _check_call(node, helpers)
        elif isinstance(node, (ast.While, ast.Lambda, ast.ListComp, ast.Try, ast.With, ast.Break, ast.Continue)):
            _allow(False, node, type(node).__name__.lower())


def _check_call(node: ast.Call, helpers: set[str]) -> None:
    keywords = [k.arg for k in node.keywords]
    if isinstance(node.func, ast.Name):
        _allow(node.func.id in helpers or node.func.id in _BUILTINS, node, f"{node.func.id}()")
        allowed: tuple[str, ...] = ()
    elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "tl":
        allowed = FUNCTIONS.get(node.func.attr, ())
    elif isinstance(node.func, ast.Attribute):
        _allow(node.func.attr in METHODS, node, f".{node.func.attr}()")
        allowed = METHODS.get(node.func.attr, ())
    else:
        _allow(False, node, ast.unparse(node.func))
        return
    extra = [k for k in keywords if k not in allowed]
    _allow(not extra, node, f"{ast.unparse(node.func)}({extra[0] if extra else ''}=...)")


def _allow(holds: bool, node: ast.AST, what: str) -> None:
    if not holds:
        line = getattr(node, "lineno", 0)
        raise ConfigError(
            f"line {line} uses {what}, which is outside the Triton that versions 3.0 to 3.6 share; write it otherwise"
        )
