"""From a functional FX graph of ATen operators to a `graph` module."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr
from xdsl.ir import Block, Region

from luban.compiler.frontend.torch import dims as torch_dims
from luban.compiler.frontend.torch import rules  # noqa: F401  (registers the rules)
from luban.compiler.frontend.torch.arguments import Arguments, bind, constant_argument
from luban.compiler.frontend.torch.builder import Builder
from luban.compiler.frontend.torch.registry import RULES, Unsupported
from luban.compiler.frontend.torch.results import Results
from luban.compiler.ir import graph
from luban.errors import UnsupportedOperatorError


@dataclass
class Imported:
    """A program and how to call it.

    The function's arguments are the tensor inputs of metadata["inputs"], in order: placeholders, then `constants`, then
    the seed if the program draws random numbers. graph.return lists the outputs of kind "buffer", in order; each is a
    value of its own. Outputs of kind "alias" are windows on an input's or another output's memory.
    """

    module: ModuleOp
    metadata: dict[str, Any]
    constants: list[torch.Tensor] = field(default_factory=list)


class _Missing:
    """Stands for a value that has no form in the IR; whatever reads it is unsupported too."""

    def __init__(self, why: str):
        self.why = why


@dataclass
class _Import:
    """One import under way: values of nodes and the nodes that could not be imported."""

    gm: GraphModule
    cx: Builder
    arguments: Arguments
    values: dict[Node, Any] = field(default_factory=dict)
    failures: list[tuple[Node, str]] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)


def import_graph(gm: GraphModule, name: str, *, saved_from: int | None = None) -> Imported:
    """The `graph` module and metadata of a functional ATen graph (what AOTAutograd gives).

    Every node needs meta["val"]. Outputs from position `saved_from` on are kept for the backward program: pool "saved".
    Raises UnsupportedOperatorError listing every operator that has no rule, with its place in the user's source.
    """
    state = _run(gm)
    if state.failures:
        raise UnsupportedOperatorError(_listed(state.failures))
    results = Results(state.cx, state.arguments)
    output = next(iter(reversed(gm.graph.nodes)))
    for i, item in enumerate(_flat(output.args[0])):
        fake = item.meta.get("val") if isinstance(item, Node) else item
        value = state.values[item] if isinstance(item, Node) else item
        results.add(value, fake, "own" if saved_from is None or i < saved_from else "saved")
    if state.cx.seed is not None:
        state.arguments.entries.append({"kind": "seed"})
    results.finish()
    return Imported(_module(state, name), _metadata(state, results), state.constants)


def unsupported(gm: GraphModule) -> list[Node]:
    """The nodes that `import_graph` could not import, for splitting a graph between Luban and eager."""
    return [node for node, _ in _run(gm).failures]


def _run(gm: GraphModule) -> _Import:
    block = Block()
    state = _Import(gm, Builder(block), Arguments(block))
    nodes = list(gm.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            _placeholder(state, node)
    for node in nodes:
        if node.op == "get_attr":
            _get_attr(state, node)
    for node in nodes:
        if node.op == "call_function":
            _call(state, node)
        elif node.op in ("call_module", "call_method"):
            state.failures.append((node, f"{node.op} {node.target}"))
    return state


def _placeholder(state: _Import, node: Node) -> None:
    try:
        state.values[node] = bind(state.arguments, node.meta.get("val"))
    except Unsupported as why:
        state.values[node] = _Missing(str(why))


def _get_attr(state: _Import, node: Node) -> None:
    value: Any = state.gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        state.values[node] = value
        return
    try:
        state.values[node] = constant_argument(state.arguments, value, len(state.constants))
        state.constants.append(value)
    except Unsupported as why:
        state.values[node] = _Missing(str(why))


def _call(state: _Import, node: Node) -> None:
    try:
        state.values[node] = _value(state, node)
    except Unsupported as why:
        state.failures.append((node, str(why)))
        state.values[node] = _stand_in(state, node)


def _value(state: _Import, node: Node) -> Any:
    values = state.values
    if node.target is operator.getitem:
        source, index = values[node.args[0]], node.args[1]  # type: ignore[index]
        if isinstance(source, _Missing):
            return source
        return source[index]  # type: ignore[index]
    fake = node.meta.get("val")
    if isinstance(fake, (torch.SymInt, int)) and not isinstance(fake, bool):
        return torch_dims.dim(fake)
    found = _rule_of(node.target)
    if found is None:
        raise Unsupported("")
    args = [_resolve(values, a) for a in node.args]
    kwargs = {k: _resolve(values, a) for k, a in node.kwargs.items()} if node.kwargs else {}
    return found(state.cx, node, *args, **kwargs)


_RULE_OF: dict[Any, Any] = {}


def _rule_of(target: Any) -> Any:
    found = _RULE_OF.get(target)
    if found is None and target not in _RULE_OF:
        found = _RULE_OF[target] = RULES.get(str(target))
    return found


def _resolve(values: dict[Node, Any], argument: Any) -> Any:
    kind = type(argument)
    if kind is Node:
        value = values[argument]
        if type(value) is _Missing:
            raise Unsupported(value.why)
        return value
    if isinstance(argument, (list, tuple)):
        return [_resolve(values, a) for a in argument]
    if isinstance(argument, torch.SymInt):
        return torch_dims.dim(argument)
    return argument


def _stand_in(state: _Import, node: Node) -> Any:
    """A value of the right shape for a failed node, so that the nodes after it can still be checked."""
    fake = node.meta.get("val")
    try:
        if isinstance(fake, torch.Tensor):
            meta = state.cx.meta(node)
            return state.cx.fill(0, meta.shape, meta.dtype)
        if isinstance(fake, (tuple, list)):
            return tuple(state.cx.fill(0, m.shape, m.dtype) if m else None for m in state.cx.metas(node))
    except Unsupported as why:
        return _Missing(str(why))
    return _Missing(f"the result of {node.target}")


def _listed(failures: list[tuple[Node, str]]) -> list[str]:
    """One text for each distinct operator and reason, at its first place."""
    found: dict[tuple[str, str], str] = {}
    for node, why in failures:
        name = operator_name(node)
        if (name, why) not in found:
            found[name, why] = name + (f" with {why}" if why else "") + _place(node)
    return list(found.values())


def operator_name(node: Node) -> str:
    """The operator's overload; that of the wrapped one where torch orders effects."""
    return str(node.args[1] if str(node.target) == "with_effects" else node.target)


def _place(node: Node) -> str:
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" ({places[-1][0]}:{places[-1][1]})" if places else ""


def _flat(output: Any) -> list[Any]:
    if isinstance(output, (list, tuple)):
        return [leaf for item in output for leaf in _flat(item)]
    return [output]


def _module(state: _Import, name: str) -> ModuleOp:
    function = graph.FuncOp.create(
        properties={
            "sym_name": StringAttr(name),
            "symbols": ArrayAttr([StringAttr(s) for s in state.arguments.names]),
        },
        regions=[Region(state.cx.block)],
    )
    return ModuleOp([function])


def _metadata(state: _Import, results: Results) -> dict[str, Any]:
    arguments = state.arguments
    missing = arguments.missing_sources()
    if missing:
        raise UnsupportedOperatorError([f"the size {s}, which no input has as a dimension of its own" for s in missing])
    return {
        "version": 1,
        "symbols": list(arguments.names),
        "inputs": arguments.entries,
        "symbol_sources": {s: arguments.sources[s] for s in arguments.names},
        "outputs": results.entries,
    }
