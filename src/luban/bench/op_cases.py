"""The memory-bound operators that are measured: a function, its inputs, and the bytes that it must move at the least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

STEP = 10  # of the optimizer's bias correction
RATE, DECAY, BETAS, EPSILON = 3e-4, 0.01, (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Case:
    """One operator on one dtype.

    `eager` is what torch has for it where that is not `function` itself. `saved`: the backward reads the inputs again.
    `gathered`: bytes that a lookup reads in place of its whole table, which comes first. `written`: inputs updated in place.
    `random`: its numbers differ from run to run.
    """

    name: str
    function: Callable
    inputs: tuple[Any, ...]
    differentiable: bool = True
    saved: bool = True
    gathered: int | None = None
    written: int = 0
    eager: Callable | None = None
    random: bool = False

    def traffic(self, outputs: Sequence[Any], backward: bool) -> tuple[int, int]:
        """Bytes read and written once: inputs and outputs; for the backward what it saved, output and input gradients."""
        sizes = [t.nbytes for t in self.inputs]
        if self.gathered is not None:
            sizes[0] = self.gathered
        reads = sum(sizes)
        made = sum(t.nbytes for t in self.inputs[: self.written]) if self.written else sum(t.nbytes for t in outputs)
        if not backward:
            return reads, made
        again = reads if self.saved and self.gathered is None else reads - sizes[0]
        gradients = sum(t.nbytes for t in self.inputs if t.is_floating_point())
        return reads + again + made, made + gradients


def make(name: str, dtype: str, quick: bool) -> Case:
    """The case of that name, tiny when `quick`."""
    import torch

    return CASES[name](name, getattr(torch, dtype), 16 if quick else 1)


def _matrix(dtype: Any, small: int, rows: int = 4096, columns: int = 1024) -> Any:
    import torch

    return torch.randn(rows // small, columns // small).to(dtype)


def _pointwise(function: Callable, count: int = 1) -> Callable[[str, Any, int], Case]:
    return lambda name, dtype, small: Case(name, function, tuple(_matrix(dtype, small) for _ in range(count)))


def _functional() -> Any:
    import torch.nn.functional as F

    return F


def _layer_norm(name: str, dtype: Any, small: int) -> Case:
    import torch

    x = _matrix(dtype, small)
    w, b = torch.ones(x.shape[1], dtype=dtype), torch.zeros(x.shape[1], dtype=dtype)
    return Case(name, lambda x, w, b: _functional().layer_norm(x, w.shape, w, b), (x, w, b))


def _rms_norm(name: str, dtype: Any, small: int) -> Case:
    import torch

    x = _matrix(dtype, small)
    return Case(name, lambda x, w: _functional().rms_norm(x, w.shape, w), (x, torch.ones(x.shape[1], dtype=dtype)))


def _cross_entropy(name: str, dtype: Any, small: int) -> Case:
    import torch

    logits = _matrix(dtype, small, 1024, 8192)
    rows, classes = logits.shape
    return Case(name, lambda z, y: _functional().cross_entropy(z, y), (logits, torch.randint(0, classes, (rows,))))


def _embedding(name: str, dtype: Any, small: int) -> Case:
    import torch

    table = _matrix(dtype, small, 50257, 384)
    index = torch.randint(0, table.shape[0], (4, 1024 // small))
    read = index.numel() * table.shape[1] * table.itemsize
    return Case(name, lambda w, i: _functional().embedding(i, w), (table, index), gathered=read)


def _embedding_bag(name: str, dtype: Any, small: int) -> Case:
    import torch

    table = _matrix(dtype, small, 100_000, 64)
    index = torch.randint(0, table.shape[0], (4096 // small, 16))
    read = index.numel() * table.shape[1] * table.itemsize
    return Case(name, lambda w, i: _functional().embedding_bag(i, w, mode="sum"), (table, index), gathered=read)


def _dropout(name: str, dtype: Any, small: int) -> Case:
    return Case(name, lambda x: _functional().dropout(x, 0.1, True), (_matrix(dtype, small),), saved=False, random=True)


def _moved(function: Callable) -> Callable[[str, Any, int], Case]:
    """Reductions and copies: their gradient does not read the input again."""
    return lambda name, dtype, small: Case(name, function, (_matrix(dtype, small),), saved=False)


def _heads(name: str, dtype: Any, small: int) -> Case:
    """(batch, length, heads, size) to (batch, heads, length, size), as attention wants it."""
    x = _matrix(dtype, small).reshape(4, -1, 4, 16)
    return Case(name, lambda x: x.permute(0, 2, 1, 3).contiguous(), (x,), saved=False)


def _adamw(name: str, dtype: Any, small: int) -> Case:
    state = tuple(_matrix(dtype, small) for _ in range(3))
    inputs = (*state, _matrix(dtype, small).abs())
    # p, m and v come first: they are updated in place
    return Case(
        name, adamw, (inputs[0], inputs[1], inputs[3], inputs[2]), differentiable=False, written=3, eager=fused_adamw
    )


def adamw(p: Any, m: Any, v: Any, g: Any) -> Any:
    """One update in place, as torch.optim.AdamW makes it."""
    m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
    v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
    root = v.sqrt().div_((1 - BETAS[1] ** STEP) ** 0.5).add_(EPSILON)
    p.mul_(1 - RATE * DECAY).addcdiv_(m, root, value=-RATE / (1 - BETAS[0] ** STEP))
    return p, m, v


def fused_adamw(p: Any, m: Any, v: Any, g: Any) -> Any:
    """The same by the kernel behind torch.optim.AdamW(fused=True)."""
    import torch

    torch._fused_adamw_(
        [p], [g], [m], [v], [], [torch.tensor(float(STEP))], lr=RATE, beta1=BETAS[0], beta2=BETAS[1],
        weight_decay=DECAY, eps=EPSILON, amsgrad=False, maximize=False,
    )  # fmt: skip
    return p, m, v


CASES: dict[str, Callable[[str, Any, int], Case]] = {
    "softmax": _pointwise(lambda x: _functional().softmax(x, -1)),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _pointwise(lambda x: _functional().gelu(x)),
    "gelu_tanh": _pointwise(lambda x: _functional().gelu(x, approximate="tanh")),
    "silu": _pointwise(lambda x: _functional().silu(x)),
    "swiglu": _pointwise(lambda x, y: _functional().silu(x) * y, 2),
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "dropout": _dropout,
    "adamw": _adamw,
    "add": lambda name, dtype, small: Case(
        name, lambda x, y: x + y, (_matrix(dtype, small), _matrix(dtype, small)), saved=False
    ),
    "sum_rows": _moved(lambda x: x.sum(-1)),
    "sum_columns": _moved(lambda x: x.sum(0)),
    "mean": _moved(lambda x: x.mean()),
    "transpose": _moved(lambda x: x.t().contiguous()),
    "heads": _heads,
}
