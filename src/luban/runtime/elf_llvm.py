"""Loads objects through llvmlite's linker, for architectures without a relocation table here (RISC-V, LoongArch)."""

from __future__ import annotations

from luban.errors import LubanError
from luban.runtime import elf


def load(data: bytes, resolve: elf.Resolver, what: str = "program") -> elf.Image:
    """The same as `elf.load`, at the price of importing LLVM. Raises LubanError when llvmlite is missing."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        raise LubanError(f"loading {what} on this architecture needs llvmlite; run: pip install llvmlite") from None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    obj = elf.parse(data, what)
    for symbol in obj.symbols:
        if symbol.name and symbol.section == elf.SHN_UNDEF:
            address = resolve(symbol.name)
            if address is None and not symbol.weak:
                raise LubanError(
                    f"{what} calls {symbol.name!r}, which this process lacks; install the library that has it"
                )
            llvm.add_symbol(symbol.name, address or 0)
    # The engine takes ownership of its target machine: one for each program.
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    names = [s.name for s in obj.symbols if s.name and 0 < s.section < len(obj.sections) and s.kind == 2]
    symbols = {name: engine.get_function_address(name) for name in names}
    return elf.Image(0, {n: a for n, a in symbols.items() if a}, engine)
