"""A compiled Program: loading, running, memory, threads, the on-disk cache, reports.

    program = cache.get(key)             what was compiled, from disk
    loaded = loaded.load(program)        its code in this process
    outputs = loaded([x, y])             one native call

No LLVM is imported here (`elf_llvm`, for RISC-V and LoongArch hosts, apart); torch and NumPy come with the first call.
"""
