"""LLVM IR text -> an object file, by way of LLVM's optimiser."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field

import llvmlite.binding as llvm

from luban.errors import LubanError, TargetError
from luban.targets import Target

_LAST_LLVM_WITH_OPTION = 22


@dataclass(frozen=True)
class CompiledModule:
    """One compiled module: the relocatable ELF object, and how long each stage took in seconds."""

    object: bytes
    text: str
    target: Target
    opt: int
    seconds: dict[str, float] = field(default_factory=dict)

    @functools.cached_property
    def assembly(self) -> str:
        """The assembly of the same code, made when first asked for."""
        machine = _machine(self.target, self.opt)
        module = _parse(self.text, machine)
        _optimise(module, machine, self.opt)
        return machine.emit_assembly(module)


def compile_module(text: str, target: Target, opt: int = 2) -> CompiledModule:
    """Compiles LLVM IR text for a target (opt 0 to 3). Raises LubanError with LLVM's message for a wrong text."""
    times = [time.perf_counter()]
    machine = _machine(target, opt)
    times.append(time.perf_counter())
    module = _parse(text, machine)
    times.append(time.perf_counter())
    _optimise(module, machine, opt)
    times.append(time.perf_counter())
    data = machine.emit_object(module)
    times.append(time.perf_counter())
    names = ("machine", "parse", "optimise", "emit")
    return CompiledModule(data, text, target, opt, {n: b - a for n, a, b in zip(names, times, times[1:], strict=False)})


@functools.cache
def _initialise(foreign: bool) -> None:
    """LLVM's targets; the foreign ones only when one is asked for."""
    if foreign:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    else:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()


@functools.cache
def _tune_x86() -> None:
    """Switches LLVM's loop strength reduction off for this process: a fifth to a half of the time of code generation.

    It rewrites indices for chips with few addressing modes, and x86 has all that our loops need (measured: same speed).
    """
    if llvm.llvm_version_info[0] <= _LAST_LLVM_WITH_OPTION:  # an unknown option would end the process
        llvm.set_option("luban", "-disable-lsr")


@functools.cache
def _machine_of(triple: str, cpu: str, features: str, opt: int) -> llvm.TargetMachine:
    native = triple.split("-")[0] == llvm.get_process_triple().split("-")[0]
    _initialise(not native)
    if triple.startswith("x86_64"):
        _tune_x86()
    try:
        target = llvm.Target.from_triple(triple)
    except RuntimeError as error:
        raise TargetError(f"LLVM knows no target {triple}: {error}; see `luban targets`") from error
    return target.create_target_machine(
        cpu=cpu, features=features, opt=opt, reloc="pic", codemodel="small", abiname=_abi(triple)
    )


def _abi(triple: str) -> str:
    return {"riscv64": "lp64d", "loongarch64": "lp64d"}.get(triple.split("-")[0], "")


def _machine(target: Target, opt: int) -> llvm.TargetMachine:
    return _machine_of(target.triple, target.llvm_cpu, target.llvm_features, opt)


def _parse(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    try:
        module = llvm.parse_assembly(text)
    except RuntimeError as error:
        raise LubanError(
            f"LLVM rejects the generated code: {error}; please report it with the IR (LUBAN_DUMP=DIR)"
        ) from error
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    return module


def _optimise(module: llvm.ModuleRef, machine: llvm.TargetMachine, opt: int) -> None:
    """Inlining of the math library and local clean-up.

    LLVM's own pipelines take five to ten times as long and gain nothing here: the code is vectors in SSA form, with its
    invariants outside of the loops, before LLVM sees it.
    """
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=opt))
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    if opt > 0:
        passes.add_simplify_cfg_pass()
        passes.add_instruction_combine_pass()
    passes.run(module, builder)
