"""A layer norm's result as a pointwise function of its input, mean and reciprocal deviation.

Those three are kept for the norm's own backward. The partitioner cannot see that they give the result too, and would keep
it beside them for the gradients of the weights that read it: 38 of 222 MB on a BERT of 6 layers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def expose_norm_values(joint: Graph) -> None:
    """Lets every reader of a layer norm's result read the pointwise function; the kernel of the forward stays one."""
    for norm in list(joint.nodes):
        if norm.target is aten.native_layer_norm.default:
            parts = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
            if {0, 1, 2} <= parts.keys():  # without statistics there is no backward, and nothing to save
                _expose(joint, norm, parts)


def _expose(joint: Graph, norm: Node, parts: dict[Any, Node]) -> None:
    result, mean, rstd = (parts[k] for k in range(3))
    source, _, weight, bias = norm.args[:4]
    with joint.inserting_before(_later(joint, parts)):
        value = _call(joint, aten.sub.Tensor, source, mean)
        value = _call(joint, aten.mul.Tensor, value, rstd)
        if weight is not None:
            value = _call(joint, aten.mul.Tensor, value, weight)
        if bias is not None:
            value = _call(joint, aten.add.Tensor, value, bias)
        if value.meta["val"].dtype != result.meta["val"].dtype:
            value = _call(joint, aten._to_copy.default, value, dtype=result.meta["val"].dtype)
    result.replace_all_uses_with(value)
    joint.erase_node(result)


def _later(joint: Graph, parts: dict[Any, Node]) -> Node:
    """The node behind the last of the norm's parts."""
    wanted = set(parts.values())
    last = next(node for node in reversed(joint.nodes) if node in wanted)
    return last.next


def _call(joint: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    made = joint.call_function(target, args, kwargs)
    values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    mode = values[0].fake_mode
    with mode:
        made.meta["val"] = target(*values, **kwargs)
    return made
