"""The option `fuse_cross_entropy`: a linear layer whose results only a cross entropy reads becomes `linear_cross_entropy`.

Between the two may stand what keeps rows in order (views, casts) and slices of the leading dims, such as a shift by one
token. Dynamo's graphs are rewritten; `luban.train_step`, which traces plain Python, watches torch's calls instead.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from luban.compiler.frontend.linear_loss import REDUCTIONS, fused_loss

LINEAR = (F.linear, torch._C._nn.linear)
KEEPS_ROWS = {"view", "reshape", "flatten", "contiguous", "float", "to", "bfloat16", "half", "type_as"}
SLICES = {"getitem", "__getitem__"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Logits:
    """Values that are rows of linear(hidden, weight, bias), in order. Tensors, or the nodes that stand for them."""

    hidden: Any
    weight: Any
    bias: Any
    multiplied: torch.dtype | None  # what autocast asked products to have
    sliced: bool = True  # whether the leading dims still are hidden's, so that a slice of one is a slice of the other


def after(logits: Logits, name: str, old: Tensor, new: Tensor) -> Logits | None:
    """What a call that keeps rows in order makes of logits, or None where it does something else."""
    if name not in KEEPS_ROWS or new.shape[-1:] != old.shape[-1:] or new.numel() != old.numel():
        return None
    if name == "view" and new.dtype is not old.dtype:  # other bits, not other numbers
        return None
    if new.dtype is not old.dtype and not {new.dtype, old.dtype} <= set(FLOATS):
        return None
    return replace(logits, sliced=logits.sliced and new.shape == old.shape)


def leaves_classes(index: Any, rank: int) -> bool:
    """Whether an index made of slices and numbers leaves the last dim whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    plain = all(i is Ellipsis or isinstance(i, (slice, int)) and not isinstance(i, bool) for i in items)
    if not plain or not items:
        return False
    if len(items) < rank and items[-1] is not Ellipsis and Ellipsis not in items:
        return True
    return items[-1] == slice(None) and (Ellipsis in items or len(items) == rank)


@dataclass(frozen=True)
class Loss:
    """The options of a cross entropy that `linear_cross_entropy` has too."""

    target: Any
    ignore_index: int
    reduction: str
    label_smoothing: float


def loss_of(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> tuple[Any, Loss] | None:  # fmt: skip
    """The input and the options of a call of F.cross_entropy, None for weights of classes and the like."""
    if weight is not None or size_average is not None or reduce is not None or reduction not in REDUCTIONS:
        return None
    return input, Loss(target, ignore_index, reduction, label_smoothing)


def fits(logits: Tensor, target: Tensor) -> bool:
    """Whether the classes are the last dim and the target tells one for each row."""
    return logits.dim() in (1, 2) and target.shape == logits.shape[:-1] and not target.is_floating_point()


def autocast_dtype() -> torch.dtype | None:
    """The dtype in which autocast multiplies now."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


# ---- torch's calls, as they happen


class WatchLoss(TorchFunctionMode):
    """While it is on, cross entropies of linear layers are fused. The layer's own results are left for nobody to read."""

    def __init__(self) -> None:
        super().__init__()
        self._logits: dict[int, tuple[Tensor, Logits]] = {}  # with the tensor itself, so that its id stays its own

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            fused = self._fused(*args, **kwargs)
            if fused is not None:
                return fused
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and args and isinstance(args[0], Tensor):
            found = self._known(func, args, kwargs, result)
            if found is not None:
                self._logits[id(result)] = (result, found)
        return result

    def _known(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> Logits | None:
        if func in LINEAR:
            return _linear(autocast_dtype() if args[0].dtype is not torch.float64 else None, *args, **kwargs)
        _, before = self._logits.get(id(args[0]), (None, None))
        if before is None:
            return None
        name = getattr(func, "__name__", "")
        if name in SLICES:
            if not before.sliced or not leaves_classes(args[1], args[0].dim()):
                return None
            return replace(before, hidden=before.hidden[args[1]])
        return after(before, name, args[0], result)

    def _fused(self, *args: Any, **kwargs: Any) -> Tensor | None:
        found = loss_of(*args, **kwargs)
        if found is None or id(found[0]) not in self._logits or not fits(found[0], found[1].target):
            return None
        logits = self._logits[id(found[0])][1]
        return cast_loss(*_arguments(logits, found[1], _loss_dtype(found[0].dtype, autocast_dtype())))


def _linear(multiplied: torch.dtype | None, input: Any, weight: Any, bias: Any = None) -> Logits:
    return Logits(input, weight, bias, multiplied)


def _loss_dtype(logits: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """The dtype that torch's own loss has: autocast computes it in float32."""
    return logits if autocast is None or logits is torch.float64 else torch.float32


def _arguments(logits: Logits, loss: Loss, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of `cast_loss`, tensors or nodes."""
    return (
        logits.hidden, logits.weight, logits.bias, loss.target, loss.ignore_index, loss.label_smoothing, loss.reduction,
        None, logits.multiplied, dtype,
    )  # fmt: skip


def cast_loss(*arguments: Any) -> Tensor:
    """`fused_loss` in the dtype given last."""
    *given, dtype = arguments
    return fused_loss(*given).to(dtype)


# ---- Dynamo's graphs


def fuse_losses(gm: GraphModule) -> None:
    """Rewrites the cross entropies of a Dynamo graph whose logits nothing else reads."""
    found = [node for node in gm.graph.nodes if node.target is F.cross_entropy]
    if not found:
        return
    modes = dict(_autocast(gm))
    for node in found:
        _rewrite(gm, node, modes)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _rewrite(gm: GraphModule, node: Node, modes: dict[Node, torch.dtype | None]) -> None:
    found = loss_of(*node.args, **node.kwargs)
    if found is None or not all(isinstance(n, Node) for n in (found[0], found[1].target)):
        return
    source, loss = found
    value, target = _value(source), _value(loss.target)
    if value is None or target is None or not fits(value, target):
        return
    with gm.graph.inserting_before(node):
        logits = _traced_back(gm, source, modes)
        if logits is None:
            return
        dtype = _loss_dtype(value.dtype, modes[node])
        made = gm.graph.call_function(cast_loss, _arguments(logits, loss, dtype))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    gm.graph.erase_node(node)


def _traced_back(gm: GraphModule, node: Node, modes: dict[Node, torch.dtype | None]) -> Logits | None:
    """What a node of the graph is rows of, if nobody else reads it or what lies before it."""
    value = _value(node)
    if len(node.users) != 1 or not node.args or value is None:
        return None
    if node.target in LINEAR:
        multiplied = modes[node] if value.dtype is not torch.float64 else None
        return _linear(multiplied, *node.args, **node.kwargs)
    source = node.args[0]
    old = _value(source)
    if old is None or not isinstance(source, Node):
        return None
    before = _traced_back(gm, source, modes)
    if before is None:
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in SLICES:
        index = node.args[1]
        if not before.sliced or not leaves_classes(index, old.dim()):
            return None
        return replace(before, hidden=gm.graph.call_function(operator.getitem, (before.hidden, index)))
    return after(before, name, old, value)


def _value(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def _autocast(gm: GraphModule) -> Iterator[tuple[Node, torch.dtype | None]]:
    """Every node with the dtype in which autocast multiplies there."""
    stack = [autocast_dtype()]
    for node in gm.graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            device, dtype, enabled, *_ = node.args
            inner = (dtype or torch.get_autocast_dtype("cpu")) if enabled else None
            stack.append(inner if device == "cpu" else stack[-1])
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            stack.pop()
        yield node, stack[-1]
