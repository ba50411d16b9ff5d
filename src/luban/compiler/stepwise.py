"""From tensors to a binary in three steps, each of which can be looked at.

ir_graph = generate_tiled_ir(A, B, tile_size=128)        # IR that knows no chip; str(ir_graph) is its text
optimized = apply_arch_specific_opts(ir_graph, "native") # the same kernel scheduled for a chip
matmul = compile_to_binary(optimized)                    # .object_code, .assembly, .llvm_ir, and callable
C = matmul(A, B)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from luban import targets
from luban.compiler import matmul
from luban.compiler.driver import GRAPH_PIPELINE, Kernels, emit_text, lower_groups
from luban.compiler.ir import dtypes, graph, tile
from luban.compiler.ir.numeric_types import from_array, poisoned, to_torch
from luban.compiler.ir.text import to_text, verify
from luban.compiler.passes.pipeline import run
from luban.errors import ConfigError, TargetError
from luban.targets.portable import PORTABLE
from luban.targets.target import Target


@dataclass(frozen=True, eq=False, repr=False)
class TiledIR:
    """A matrix product in IR: the `graph` module that says what, and the `tile` kernel that says in which order.

    `str()` gives the kernel's text, `graph_text` the graph's; both parse back and are input for `luban ir`. `target` is
    the chip that the kernel is scheduled for, "portable" before `apply_arch_specific_opts`.
    """

    problem: matmul.Matmul
    tile_size: int | None
    target: Target
    graph: ModuleOp
    tile: ModuleOp
    kernels: Kernels
    function: graph.FuncOp

    def __repr__(self) -> str:
        blocks = "the chip's blocks" if self.tile_size is None else f"blocks of {self.tile_size}"
        return f"<tiled IR of {_said(self.problem)}, {blocks}, for {self.target.name}>"

    def __str__(self) -> str:
        return to_text(self.tile)

    @property
    def graph_text(self) -> str:
        """The graph module as text."""
        return to_text(self.graph)

    def verify(self) -> None:
        """Checks every rule of both modules. Raises VerificationError naming the operation and the rule."""
        verify(self.graph)
        verify(self.tile)

    def interpret(self, a: Any, b: Any) -> Any:
        """A @ B by the reference interpreter, from the tile kernel as it stands; gives what `a` is, a tensor or an array.

        Slow, and every access is checked. Raises ConfigError for inputs that do not fit.
        """
        from luban.compiler.ir.interpret_tile import run_kernel

        self._check(a, b)
        elements = [dtypes.from_name(name) for name in self.problem.dtypes]
        rows, columns = self.problem.shapes[2]
        out = poisoned(rows * columns, elements[2])
        turned = (self.problem.a_turned, self.problem.b_turned)
        held = [from_array(_plain(x), element, name) for x, element, name in zip((a, b), elements, "AB")]
        flat = [(x.T if t else x).reshape(-1) for x, t in zip(held, turned, strict=True)]
        run_kernel(tile.find_kernels(self.tile)[0], [*flat, out])
        return _like(a, out.reshape(rows, columns), self.problem)

    def _check(self, a: Any, b: Any) -> None:
        given = matmul.matmul_of(a, b)
        if not given.fits(self.problem):
            raise ConfigError(
                f"this IR is for {_said(self.problem)}, not {_said(given)}; generate it for these operands"
            )


def generate_tiled_ir(a: Any, b: Any, tile_size: int | None = None) -> TiledIR:
    """The tiled IR of A @ B for two torch tensors, NumPy arrays or (shape, dtype) pairs.

    Only shapes, dtypes and strides are read. A dense operand with its columns one after the other, such as a transpose,
    is read as it lies; what else is not row-major is copied when the binary is called.

    tile_size: side of the cache blocks, in rows, columns and values of k, which scheduling for a chip rounds up to that
    chip's register tile; None derives the blocks from the chip's caches, which is faster. Raises ConfigError, in one
    sentence, for operands or a tile size that cannot work.
    """
    if tile_size is not None and (isinstance(tile_size, bool) or not isinstance(tile_size, int) or tile_size < 1):
        raise ConfigError(f"tile_size is {tile_size!r}; pass a whole number of at least 1, or None")
    problem = matmul.matmul_of(a, b)
    return _lowered(problem, matmul.graph_module(problem), tile_size, PORTABLE)


def apply_arch_specific_opts(ir_graph: TiledIR, target: str | Target = "native") -> TiledIR:
    """The kernel scheduled for a CPU target: its register tile, its dot unit and the packing that the unit wants.

    Raises TargetError for an unknown target, and for a GPU or NPU.
    """
    _require_ir(ir_graph)
    chip = targets.get(target)
    if not chip.is_cpu:
        raise TargetError(
            f"{chip.name} takes Triton source and not machine code; choose a CPU target from `luban targets`"
        )
    lacking = [name for name in ir_graph.problem.dtypes if name not in chip.dtypes]
    if lacking:
        raise TargetError(f"{chip.name} has no {lacking[0]}; choose one of {', '.join(chip.dtypes)}")
    return _lowered(ir_graph.problem, ir_graph.graph, ir_graph.tile_size, chip)


def compile_to_binary(optimized: TiledIR) -> Binary:
    """Machine code for the target that the IR is scheduled for. Raises ConfigError for IR that knows no chip yet."""
    from luban.compiler.codegen.llvm.compile import compile_module

    _require_ir(optimized)
    if optimized.target is PORTABLE:
        raise ConfigError("this IR is scheduled for no chip yet; pass it through apply_arch_specific_opts first")
    target = optimized.target
    emitted = emit_text(optimized.function, optimized.kernels, matmul.metadata(optimized.problem), target, "matmul")
    return Binary(optimized, emitted.metadata, compile_module(emitted.text, target))


def _require_ir(given: Any) -> None:
    if not isinstance(given, TiledIR):
        raise ConfigError(f"got {type(given).__name__} in place of tiled IR; pass what generate_tiled_ir returned")


def _lowered(problem: matmul.Matmul, module: ModuleOp, tile_size: int | None, target: Target) -> TiledIR:
    fused = module.clone()
    run(fused, GRAPH_PIPELINE)
    function = next(op for op in fused.body.block.ops if isinstance(op, graph.FuncOp))
    kernels = lower_groups(function, (), target, tile_size)
    made = [lowered.kernel for lowered in kernels.unique.values()]
    for kernel in made:
        _name_values(kernel)
    return TiledIR(problem, tile_size, target, module, ModuleOp(made), kernels, function)


class Binary:
    """A compiled matrix product: `matmul(A, B)` gives C on this machine's chip; the code of any target can be read.

    object_code   bytes of a relocatable ELF object     assembly   its text
    llvm_ir       what LLVM was given                   target     the target's name
    """

    def __init__(self, ir: TiledIR, metadata: dict[str, Any], compiled: Any):
        self.ir, self._metadata, self._compiled = ir, metadata, compiled
        self.target: str = ir.target.name
        self.object_code: bytes = compiled.object
        self.llvm_ir: str = compiled.text
        self._fast: Callable[[Any, Any], Any] = self._first

    @property
    def assembly(self) -> str:
        """The assembly of the same code, made when first asked for."""
        return self._compiled.assembly

    def __call__(self, a: Any, b: Any) -> Any:
        """C = A @ B, a tensor or an array as A and B are; operands that lie in another way than A and B did are copied.

        Raises ConfigError for operands that do not fit, TargetError where the code is another chip's.
        """
        return self._fast(a, b)

    def _first(self, a: Any, b: Any) -> Any:
        """The first call on tensors finds the way of the others; one on arrays leaves that open."""
        if _is_torch(a) and _is_torch(b):
            self._fast = self._loaded.on_torch.pair(self._of_any)
            return self._fast(a, b)
        return self._of_any(a, b)

    def _of_any(self, a: Any, b: Any) -> Any:
        """The product of operands that may be wrong or lie in another way."""
        self.ir._check(a, b)
        if _is_torch(a) != _is_torch(b):
            raise ConfigError("one operand is a torch tensor and the other is not; pass two of a kind")
        problem = self.ir.problem
        turned = (problem.a_turned, problem.b_turned)
        if _is_torch(a):
            return self._loaded([_dense(x, t) for x, t in zip((a, b), turned)])[0]
        return self._loaded.call_numpy([_laid(x, t) for x, t in zip((a, b), turned, strict=True)])[0]

    @functools.cached_property
    def _loaded(self) -> Any:
        from luban.runtime.loaded import load
        from luban.runtime.program import Program

        here = targets.get("native")
        if self.ir.target.family != here.family:
            raise TargetError(
                f"this matmul is {self.target} code, which the {here.family} chip here cannot run; "
                'compile it with target="native" to call it'
            )
        return load(Program(self._metadata, self.object_code))

    def __repr__(self) -> str:
        return f"<matmul for {self.target}: {_said(self.ir.problem)}, {len(self.object_code)} bytes of object code>"


def _said(problem: matmul.Matmul) -> str:
    multiplied = " by ".join(dict.fromkeys(problem.dtypes[:2]))
    return f"({problem.m}, {problem.k}) @ ({problem.k}, {problem.n}) in {multiplied}"


def _laid(array: np.ndarray, turned: bool) -> np.ndarray:
    return np.asfortranarray(array) if turned else np.ascontiguousarray(array)


def _dense(tensor: Any, turned: bool) -> Any:
    whole = tensor.detach().resolve_neg()  # the imaginary part of a conjugate is a negation that waits
    return whole.t().contiguous().t() if turned else whole.contiguous()


def _is_torch(value: Any) -> bool:
    return hasattr(value, "detach")


def _plain(value: Any) -> Any:
    """NumPy bfloat16 as float32, which is how the interpreter holds it."""
    return value.astype(np.float32) if getattr(value.dtype, "name", "") == "bfloat16" else value


def _like(given: Any, array: np.ndarray, problem: matmul.Matmul) -> Any:
    """C as a tensor or an array, as A is."""
    left, _, result = problem.dtypes
    if _is_torch(given):
        return to_torch(array, dtypes.from_name(result))
    return array.astype(given.dtype if result == left else result)


# ---- names of values, so that the text can be read


def _name_values(kernel: tile.KernelOp) -> None:
    """Hints for the printer: a, b, c for the buffers, and what an operation stands for else."""
    for argument, hint in zip(kernel.body.block.args, "abc", strict=False):
        argument.name_hint = hint
    for value, hint in _hints(kernel):
        value.name_hint = hint


def _hints(kernel: Operation) -> Iterator[tuple[SSAValue, str]]:
    for op in kernel.walk():
        if isinstance(op, tile.DimOp):
            yield op.result, f"n{op.value.data[0]}"
        elif isinstance(op, tile.AllocOp):
            packed = any(isinstance(use.operation, tile.PackOp) for use in op.buffer.uses)
            yield op.buffer, "panel" if packed else "partial"
        elif isinstance(op, tile.ForOp):
            yield op.body.block.args[0], {"parallel": "task", "serial": "step"}.get(op.role.data, "lane")
        elif isinstance(op, tile.DotOp):
            yield from zip(op.body.block.args, ("sum", "i", "j"), strict=True)
