"""What a schedule is tuned for, as a key that does not change from one version to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xdsl.ir import Attribute, Operation

from luban.compiler.ir import dtypes
from luban.compiler.ir.graph import shared_heads
from luban.errors import ConfigError
from luban.symbolic import Dim

if TYPE_CHECKING:
    from luban.kernels.gemm_schedule import Shape

GEMM, ATTENTION, ATTENTION_BACKWARD = OPS = ("gemm", "attention", "attention_backward")
_NAMES = {dtypes.from_name(n): n for n in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int8")}


@dataclass(frozen=True)
class Workload:
    """One kernel's problem; its text, `str()`, is a key, and `read` makes it again.

    gemm        shape (batch, m, n, k); dtypes: that of the products, then those in which A and B lie; layout: of A and of
                B "n" (dense rows), "t" (dense columns) or element strides "64:1" along (m or n) and k
    attention   shape (batch, heads, queries, keys, head size); layout: "causal" or "full", "shared:2" heads of keys, and
                "rows:" with the distance of positions of each operand
    precision   torch's for float32 products
    threads     cores that the schedule is for
    """

    op: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    layout: tuple[str, ...]
    precision: str
    threads: int

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.op} {sizes} {','.join(self.dtypes)} {','.join(self.layout)} {self.precision} {threads}"


def read(text: str) -> Workload:
    """The workload of a text. Raises ConfigError for what is none."""
    try:
        op, sizes, names, layout, precision, threads, _ = text.split(" ")
        shape = tuple(int(size) for size in sizes.split("x"))
        found = Workload(op, tuple(names.split(",")), shape, tuple(layout.split(",")), precision, int(threads))
    except ValueError:
        raise ConfigError(f"{text!r} is not the text of a workload; `luban tune --list` shows some") from None
    if op not in OPS or str(found) != text:
        raise ConfigError(f"{text!r} is not the text of a workload; `luban tune --list` shows some")
    return found


def of_gemm(
    cores: int, shape: Shape, dtype: Attribute, held: tuple[Attribute, ...] | None, precision: str
) -> Workload | None:
    """The workload of a contraction; None where a size is known only at run time, or there is nothing to do."""
    sizes = _numbers(shape.batch, shape.m, shape.n, shape.k)
    strides = _numbers(shape.a_m, shape.a_k, shape.b_n, shape.b_k, least=0)
    if sizes is None or strides is None or dtype not in _NAMES:
        return None
    _, m, n, k = sizes
    a_m, a_k, b_n, b_k = strides
    names = tuple(_NAMES[t] for t in (dtype, *(held or (dtype, dtype))))
    return Workload(GEMM, names, sizes, layout_of((m, n, k), strides), precision, cores)


def layout_of(sizes: tuple[int, int, int], strides: tuple[int, ...]) -> tuple[str, str]:
    """The layout of A and B with (m, n, k) and the strides of A along m and k, of B along n and k."""
    (m, n, k), (a_m, a_k, b_n, b_k) = sizes, strides
    return _laid(a_m, a_k, (k, 1), (1, m)), _laid(b_n, b_k, (1, n), (k, 1))


def strides_of(workload: Workload) -> tuple[tuple[int, int], tuple[int, int]]:
    """Element strides of a contraction's A along (m, k) and of its B along (n, k)."""
    _, m, n, k = workload.shape
    named = ({"n": (k, 1), "t": (1, m)}, {"n": (1, n), "t": (k, 1)})
    a, b = (names.get(text) or _pair(text) for names, text in zip(named, workload.layout, strict=True))
    return a, b


def of_attention(cores: int, op: Operation) -> Workload | None:
    """The workload of an attention or its gradients.

    None with a bias, with features that do not lie side by side, and where a size is known only at run time.
    """
    backward = op.name.endswith("backward")
    rows = 5 if backward else 3
    properties: dict[str, Any] = op.properties  # type: ignore[assignment]
    sizes = _numbers(*properties["domain"].data)
    accesses = properties["accesses"].data
    steps = _numbers(*(access.strides[2] for access in accesses[:rows]))
    dtype = op.operands[1].type.dtype  # type: ignore[attr-defined]
    biased = len(op.operands) > (6 if backward else 3)
    beside = all(access.strides[3] == 1 for access in accesses[:rows])
    if biased or sizes is None or steps is None or not beside or dtype not in _NAMES:
        return None
    causal = "causal" if properties["causal"].value.data else "full"
    layout = (causal, f"shared:{shared_heads(op)}", "rows:" + ":".join(map(str, steps)))
    return Workload(ATTENTION_BACKWARD if backward else ATTENTION, (_NAMES[dtype],), sizes, layout, "highest", cores)


def rows_of(workload: Workload) -> tuple[int, ...]:
    """The distance of positions in each operand of an attention."""
    return tuple(int(step) for step in workload.layout[2].split(":")[1:])


def shared_of(workload: Workload) -> int:
    """How many heads of an attention share one head of keys."""
    return int(workload.layout[1].split(":")[1])


def _numbers(*dims: Dim, least: int = 1) -> tuple[int, ...] | None:
    return tuple(dims) if all(isinstance(d, int) and d >= least for d in dims) else None  # type: ignore[arg-type]


def _laid(outer: int, k: int, rows: tuple[int, int], columns: tuple[int, int]) -> str:
    strides = (outer, k)
    return "n" if strides == rows else "t" if strides == columns else f"{outer}:{k}"


def _pair(text: str) -> tuple[int, int]:
    outer, k = text.split(":")
    return int(outer), int(k)
