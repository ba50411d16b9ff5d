"""`luban ir`: prints an IR file, transforms it by passes, verifies it, interprets it, finds the pass that breaks it."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luban.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Attribute

NO_BUFFERS = "a kernel's buffers have no size in the IR; give one flat array for each with --inputs FILE.npz"
FIRST = 8  # values of each result that are shown


def configure(parser: argparse.ArgumentParser) -> None:
    """The file, what to do to it, and what to run it with."""
    parser.add_argument("file", metavar="FILE", help="an IR module as text; - reads standard input")
    parser.add_argument(
        "--passes", metavar="LIST", default="", help="a pipeline, e.g. simplify,cse,fuse{max_ops=64},dce"
    )
    parser.add_argument("--verify-each", action="store_true", help="check every rule after every pass")
    parser.add_argument(
        "--run", action="store_true", help="interpret the module (after the passes) and show its results"
    )
    parser.add_argument(
        "--bisect", action="store_true", help="interpret after each pass; name the first that changes a result"
    )
    parser.add_argument(
        "--inputs", metavar="FILE.npz", help="arrays for --run and --bisect, in order; without it, seeded noise"
    )
    parser.add_argument(
        "--symbols", metavar="s0=4,s1=8", default="", help="values of the symbolic dims for --run and --bisect"
    )
    parser.add_argument(
        "--kernel", metavar="NAME", help="which tile kernel --run interprets, where the module holds kernels"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="relative error that --bisect allows (default 1e-5)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The transformed module as text, its results and the pass at fault as asked. Raises ConfigError for bad input."""
    from luban.compiler.ir.text import parse, to_text, verify
    from luban.compiler.passes import pipeline

    module = parse(_read(args.file), args.file)
    verify(module)
    passes = pipeline.parse_pipeline(args.passes)
    if not args.tolerance >= 0:
        raise ConfigError(f"--tolerance must be a number of at least 0, not {args.tolerance}")
    symbols = _symbols(args.symbols)
    if args.run or args.bisect:
        _check_symbols(module, args, symbols)
    result: dict[str, Any] = {"ok": True, "file": args.file, "passes": [p.name for p in passes]}
    if args.bisect:
        culprit = pipeline.bisect(module, passes, _inputs(module, args, symbols), symbols, args.tolerance)
        result["ok"] = culprit is None
        result["culprit"] = culprit and {"position": culprit.position, "pass": culprit.name, "reason": culprit.reason}
        if culprit is not None:
            return result
    pipeline.run(module, passes, verify_each=args.verify_each)
    result["module"] = to_text(module)
    if args.run:
        result["results"] = [_summary(name, array) for name, array in _interpret(module, args, symbols)]
    return result


def text(result: dict[str, Any]) -> str:
    """The module, with what else there is to say as comments, so that the output still is IR text."""
    lines = [result["module"].rstrip()] if "module" in result else []
    if result.get("culprit"):
        c = result["culprit"]
        lines.append(f"// pass {c['position'] + 1} ({c['pass']}) changes the program: {c['reason']}")
    elif "culprit" in result:
        lines.append("// every pass keeps every result")
    for r in result.get("results", []):
        shape = ", ".join(map(str, r["shape"]))
        lines.append(
            f"// {r['name']}: {r['dtype']}[{shape}] sum {r['sum']:.9g} sha256 {r['sha256'][:16]} first {r['first']}"
        )
    return "\n".join(lines)


def _read(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {name}: {reason}; give a file with an IR module") from error


def _symbols(listed: str) -> dict[str, int]:
    found = {}
    for item in filter(None, listed.split(",")):
        name, _, value = item.partition("=")
        try:
            found[name.strip()] = int(value)
        except ValueError as error:
            raise ConfigError(f"cannot read the symbol {item!r}; write --symbols s0=4,s1=8") from error
        if found[name.strip()] < 0:
            raise ConfigError(f"the symbol {item!r} is a size and cannot be negative; write --symbols s0=4,s1=8")
    return found


def _check_symbols(module: ModuleOp, args: argparse.Namespace, symbols: dict[str, int]) -> None:
    """Raises ConfigError naming every symbol of what is to be interpreted that has no value."""
    from luban.compiler.ir import tile

    kernels = tile.find_kernels(module)
    chosen = [k for k in kernels if args.kernel in (None, k.sym_name.data)] if kernels else module.body.block.ops
    wanted = [s.data for op in chosen for s in getattr(op, "symbols", None) or ()]
    missing = [s for s in dict.fromkeys(wanted) if s not in symbols]
    if missing:
        example = ",".join(f"{s}=8" for s in missing)
        raise ConfigError(f"the symbol {' and '.join(missing)} has no value; give it one, e.g. --symbols {example}")


def _interpret(module: ModuleOp, args: argparse.Namespace, symbols: dict[str, int]) -> list[tuple[str, np.ndarray]]:
    from luban.compiler.ir import interpret_tile, tile
    from luban.compiler.ir.interpret_graph import find_function, run_graph

    kernels = tile.find_kernels(module)
    if args.kernel is None and not kernels:
        find_function(module)
        outputs = run_graph(module, _inputs(module, args, symbols), symbols)
        return [(f"result {i}", array) for i, array in enumerate(outputs)]
    chosen = [k for k in kernels if args.kernel in (None, k.sym_name.data)]
    if len(chosen) != 1:
        names = ", ".join(k.sym_name.data for k in kernels) or "none"
        raise ConfigError(f"choose one of the module's kernels with --kernel NAME; it holds {names}")
    if args.inputs is None:
        raise ConfigError(NO_BUFFERS)
    buffers = _load(args.inputs)
    interpret_tile.run_kernel(chosen[0], buffers, symbols)
    return [(f"buffer {i}", array) for i, array in enumerate(buffers)]


def _inputs(module: ModuleOp, args: argparse.Namespace, symbols: dict[str, int]) -> list[Any]:
    """The arrays of --inputs, or deterministic ones: argument i is drawn from a generator seeded with i."""
    from luban import symbolic
    from luban.compiler.ir import tile
    from luban.compiler.ir.attributes import TensorType
    from luban.compiler.ir.interpret_graph import find_function

    if args.inputs is not None:
        return _load(args.inputs)
    if tile.find_kernels(module):
        raise ConfigError(NO_BUFFERS)
    arguments = find_function(module).body.block.args
    made = []
    for i, argument in enumerate(arguments):
        if not isinstance(argument.type, TensorType):
            raise ConfigError(
                f"argument {i} is no tensor and cannot be made up; give the inputs with --inputs FILE.npz"
            )
        shape = tuple(symbolic.evaluate(d, symbols) for d in argument.type.shape)
        made.append(_noise(shape, argument.type.dtype, i))
    return made


def _noise(shape: tuple[int, ...], element: Attribute, seed: int) -> np.ndarray:
    import numpy as np

    from luban.compiler.ir.numeric_types import conform, is_float, numpy_dtype

    rng = np.random.default_rng(seed)
    if is_float(element):
        return conform(rng.standard_normal(shape), element)
    return rng.integers(0, 2, shape).astype(numpy_dtype(element))  # 0 and 1 are valid indices nearly everywhere


def _load(name: str) -> list[np.ndarray]:
    import zipfile

    import numpy as np

    try:
        with np.load(name, allow_pickle=False) as file:
            return [file[key] for key in file.files]
    except (OSError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"cannot read arrays from {name}; give a .npz file that numpy.savez wrote") from error


def _summary(name: str, array: np.ndarray) -> dict[str, Any]:
    import numpy as np

    flat = np.ascontiguousarray(array).reshape(-1)
    return {
        "name": name,
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "sum": float(flat.sum(dtype=np.float64)),
        "sha256": hashlib.sha256(flat.tobytes()).hexdigest(),
        "first": flat[:FIRST].tolist(),
    }
