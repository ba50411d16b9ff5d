"""`linear_cross_entropy`: the cross entropy of a linear layer's results, which are never written as a whole.

Three operators of the dispatcher carry it: one makes the sum of the losses and its gradients while the logits of each part
of the rows are at hand (torch's backward then only scales them); for `reduction="none"`, where rows count differently, the
backward computes the logits again. Eager calls run compiled programs of one operator each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from luban.compiler.frontend.compile_fx import CompiledGraph, compile_fx
from luban.errors import ConfigError

_OPTIONS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float label_smoothing, "
    "float? softcap, ScalarType? multiplied"
)
_library = torch.library.Library("luban", "FRAGMENT")
_library.define(f"linear_cross_entropy_sum({_OPTIONS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"linear_cross_entropy_rows({_OPTIONS}) -> Tensor")
_library.define(
    f"linear_cross_entropy_rows_backward({_OPTIONS}, bool[] wanted, Tensor grad) -> (Tensor, Tensor, Tensor)"
)
_ops = torch.ops.luban
REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """cross_entropy(linear(hidden, weight, bias), target) with exact gradients, in memory for some rows of logits only.

    hidden: (..., features); weight: (classes, features); target: classes, of hidden's leading shape. The loss is float32
    (float64 for float64) also where bfloat16 or float16 are multiplied, as under autocast; sums over rows and classes are
    too. softcap: logits become softcap * tanh(logits / softcap). Raises ConfigError for arguments that do not fit.
    """
    _check(hidden, weight, target, bias, label_smoothing, reduction, softcap)
    return fused_loss(
        hidden, weight, bias, target, ignore_index, label_smoothing, reduction, softcap, _multiplied(hidden)
    )


def fused_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float,
    reduction: str, softcap: float | None, multiplied: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """`linear_cross_entropy` of arguments that fit, with the dtype to multiply in (None: hidden's)."""
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    options = (weight, bias, classes, ignore_index, float(label_smoothing), softcap, multiplied)
    if reduction == "none":
        return _ops.linear_cross_entropy_rows(rows, *options).reshape(target.shape)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    total = _ops.linear_cross_entropy_sum(rows, *options, wanted)[0]
    if reduction == "sum":
        return total
    count = (classes != ignore_index).sum()
    # where nothing counts the loss is NaN and the gradients are 0, as torch has them
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _multiplied(hidden: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks products to have, None where it asks for none."""
    amp = torch.is_autocast_enabled("cpu") and hidden.dtype is not torch.float64
    return torch.get_autocast_dtype("cpu") if amp else None


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, smoothing: float, reduction: str,
    softcap: float | None,
) -> None:  # fmt: skip
    where = "luban.kernels.linear_cross_entropy: "
    if reduction not in REDUCTIONS:
        raise ConfigError(f"{where}reduction={reduction!r} is not known; use one of {', '.join(REDUCTIONS)}")
    if not 0 <= smoothing <= 1:
        raise ConfigError(f"{where}label_smoothing={smoothing} is not between 0 and 1")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"{where}softcap={softcap} is not above 0; give None for none")
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ConfigError(
            f"{where}hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; "
            "hidden is (..., features), weight (classes, features)"
        )
    if target.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"{where}target {tuple(target.shape)} must have one class for each of the {tuple(hidden.shape[:-1])} rows"
        )
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise ConfigError(f"{where}target holds {target.dtype}; give classes as integers")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"{where}bias {tuple(bias.shape)} must have one entry for each of {weight.shape[0]} classes")
    kinds = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if not all(k.is_floating_point for k in kinds) or (len(kinds) > 1 and _multiplied(hidden) is None):
        raise ConfigError(f"{where}hidden, weight and bias hold {', '.join(map(str, kinds))}; give one float dtype")


# ---- shapes


def _compute(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype is torch.float64 else torch.float32


def _gradients_like(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> list[Tensor]:
    """Row-major tensors of the gradients' shapes; empty ones for those that are not wanted."""
    kinds = (hidden.dtype, weight.dtype, hidden.dtype if bias is None else bias.dtype)
    sizes = (hidden.shape, weight.shape, weight.shape[:1])
    return [hidden.new_empty(size if want else (0,), dtype=kind) for size, want, kind in zip(sizes, wanted, kinds)]


@torch.library.register_fake("luban::linear_cross_entropy_sum", lib=_library)
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return hidden.new_empty((), dtype=_compute(hidden)), *_gradients_like(hidden, weight, bias, options[-1])


@torch.library.register_fake("luban::linear_cross_entropy_rows", lib=_library)
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty(hidden.shape[:1], dtype=_compute(hidden))


@torch.library.register_fake("luban::linear_cross_entropy_rows_backward", lib=_library)
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return tuple(_gradients_like(hidden, weight, bias, options[-2]))


# ---- gradients


def _keep_gradients(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.wanted, ctx.has_bias = inputs[-1], inputs[2] is not None
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, grad: Tensor | None, *second: Tensor | None) -> tuple[Any, ...]:
    _refuse_second(second)
    if grad is None:
        return (None,) * 9
    made = [g * grad.to(g.dtype) if want else None for g, want in zip(ctx.saved_tensors, ctx.wanted)]
    return (*made, *(None,) * 6)


def _keep_inputs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    hidden, weight, bias, target, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, bias, target)


def _compute_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    found = _ops.linear_cross_entropy_rows_backward(*ctx.saved_tensors, *ctx.options, wanted, grad)
    return (*(g if want else None for g, want in zip(found, wanted)), *(None,) * 5)


def _refuse_second(gradients: Sequence[Tensor | None]) -> None:
    if any(g is not None for g in gradients):
        raise ConfigError(
            "linear_cross_entropy has no second derivative; use cross_entropy(linear(...)) where you need one"
        )


torch.library.register_autograd(
    "luban::linear_cross_entropy_sum", _scale_gradients, setup_context=_keep_gradients, lib=_library
)
torch.library.register_autograd(
    "luban::linear_cross_entropy_rows", _compute_gradients, setup_context=_keep_inputs, lib=_library
)
torch.library.register_autograd(
    "luban::linear_cross_entropy_rows_backward",
    lambda ctx, *grads: _refuse_second(grads),
    setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False),
    lib=_library,
)


# ---- eager calls

_programs: dict[Any, CompiledGraph] = {}


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    return tuple(value) if isinstance(value, list) else value


def _runner(name: str) -> Any:
    """What runs an operator on real tensors: a program for their shapes, made when they first come."""
    operator = getattr(_ops, name).default

    def run(*arguments: Any) -> Any:
        key = (name, torch.get_float32_matmul_precision(), *map(_described, arguments))
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        if key not in _programs:
            _programs[key] = _compile(operator, arguments, tensors)
        found = _programs[key]([t.detach() for t in tensors])
        return found[0] if len(operator._schema.returns) == 1 else tuple(found)

    return run


def _compile(operator: Any, arguments: Sequence[Any], tensors: Sequence[Tensor]) -> CompiledGraph:
    def call(*given: Tensor) -> Any:
        rest = iter(given)
        found = operator(*(next(rest) if isinstance(a, Tensor) else a for a in arguments))
        return [found] if isinstance(found, Tensor) else list(found)

    with torch.no_grad():
        return compile_fx(make_fx(call, tracing_mode="fake")(*tensors), "native", operator._schema.name.split("::")[1])


for _name in ("linear_cross_entropy_sum", "linear_cross_entropy_rows", "linear_cross_entropy_rows_backward"):
    _library.impl(_name, _runner(_name), "CPU")
