"""Cache keys: what a compiled program depends on, as one hash, without building any IR."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

import luban
from luban.runtime.cache import key
from luban.targets.target import Target


def graph_key(gm: GraphModule, target: Target, *extra: str) -> str:
    """The key of an FX graph with fake-tensor metadata for a target."""
    lines = [_code_version(), torch.__version__, repr(target), torch.get_float32_matmul_precision(), *extra]
    for node in gm.graph.nodes:
        lines.append(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}")
        if node.op in ("placeholder", "get_attr"):
            lines.append(_describe(node, gm))
    return key(*lines)


def _describe(node: Node, gm: GraphModule) -> str:
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = getattr(gm, str(node.target), None)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"
    return str(value)


@cache
def _code_version() -> str:
    """Changes whenever a file of the package does, so that no entry outlives the code that made it."""
    root = Path(luban.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        stat = path.stat()
        digest.update(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
