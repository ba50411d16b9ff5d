"""`luban tune WHAT`: measures schedules on this machine and keeps the faster ones for the next compilation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from luban.cli import output
from luban.cli.progress import Progress
from luban.errors import ConfigError
from luban.recipes.interrupt import Interrupt

if TYPE_CHECKING:
    from luban.kernels.tuning.workload import Workload

OPERATORS = ("gemm", "attention")
BENCHED = ("gpt2", "bert", "llama", "vit", "mlp")  # the models of `luban bench models`
RECIPES = ("gpt",)
DTYPES = ("float32", "bfloat16", "float16", "float64")
LONGEST = 7 * 24 * 3600


def configure(parser: argparse.ArgumentParser) -> None:
    """What to tune, how it lies, how long to search."""
    models = ", ".join((*RECIPES, *BENCHED))
    parser.add_argument(
        "what", nargs="?", metavar="WHAT", help=f"gemm or attention, or a model's training step: {models}"
    )
    parser.add_argument(
        "shapes", nargs="*", metavar="SHAPE", help="gemm: MxNxK or BxMxNxK; attention: BATCHxHEADSxLENGTHxSIZE"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the operands (default: float32)")
    parser.add_argument(
        "--layout",
        choices=("nn", "nt", "tn", "tt"),
        default="nn",
        help="gemm: A and B by rows (n) or transposed (t); a linear layer is nt (default: nn)",
    )
    parser.add_argument(
        "--precision",
        choices=("highest", "high", "medium"),
        default="highest",
        help="gemm: torch's float32 matmul precision",
    )
    parser.add_argument("--causal", action="store_true", help="attention: no query sees later keys")
    parser.add_argument(
        "--shared", type=int, default=1, metavar="N", help="attention: query heads a head of keys (default: 1)"
    )
    parser.add_argument("--quick", action="store_true", help="a model's tiny size")
    parser.add_argument("--seconds", type=_seconds, default=60.0, metavar="S", help="time in all (default: 60)")
    parser.add_argument("--target", default="native", help="must be this machine's chip (default: native)")
    parser.add_argument("--list", action="store_true", help="show the tuned schedules")
    parser.add_argument("--clear", action="store_true", help="remove your own, and what was measured for them")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to a week")
    return value


def run(args: argparse.Namespace) -> dict[str, Any]:
    """{"chip", "table", "rows", "summary"} of a tuning; {"entries"} or {"removed"} of the table. Raises ConfigError."""
    asked = [args.list, args.clear, args.what is not None]
    if sum(asked) != 1:
        raise ConfigError("say one of: what to tune, --list, --clear; see `luban tune --help`")
    if args.list:
        return _listed()
    if args.clear:
        return _cleared()
    _check(args)
    from luban.kernels.tuning.tune import this_machine, tune

    cores = this_machine(args.target).cores
    total = max(1, round(args.seconds))
    if args.what not in OPERATORS:
        Progress("tune", total).note(f"compiling a step of {args.what}")
    workloads = _workloads(args, cores)
    progress = Progress("tune", total)
    try:
        with Interrupt("after this batch and a last meeting of the best") as interrupt:
            return tune(
                workloads,
                args.seconds,
                args.target,
                lambda gone, what: progress.update(min(round(gone), total - 1), what),
                lambda: interrupt.asked,
            )
    finally:
        progress.close()


def _check(args: argparse.Namespace) -> None:
    known = (*OPERATORS, *RECIPES, *BENCHED)
    if args.what not in known:
        raise ConfigError(f"there is nothing called {args.what!r} to tune; choose among {', '.join(known)}")
    if args.what in OPERATORS and not args.shapes:
        example = "1024x1024x1024" if args.what == "gemm" else "4x6x256x64"
        raise ConfigError(f"say for which shapes, as in `luban tune {args.what} {example}`")
    if args.what not in OPERATORS and args.shapes:
        raise ConfigError(f"the model {args.what} has its own shapes; leave {' '.join(args.shapes)} out")
    if args.what not in OPERATORS and args.dtype not in DTYPES[:2]:
        raise ConfigError(f"models train in float32 or bfloat16, not in {args.dtype}")


def _workloads(args: argparse.Namespace, cores: int) -> dict[Workload, int]:
    from luban.kernels.tuning import collect

    if args.what == "gemm":
        shapes = [_sizes(text) for text in args.shapes]
        return {collect.gemm(sizes, args.dtype, args.layout, args.precision, cores): 1 for sizes in shapes}
    if args.what == "attention":
        found: dict[Workload, int] = {}
        for text in args.shapes:
            found |= collect.attention(_sizes(text), args.dtype, args.causal, args.shared)
    else:
        found = collect.used(_step(args))
    if not found:
        raise ConfigError(f"{args.what} has no product and no attention of known size; there is nothing to tune")
    return found


def _step(args: argparse.Namespace) -> Any:
    """A training step of a model."""
    if args.what in RECIPES:
        from luban.recipes.gpt.one_step import step

        return step(args.dtype, args.quick)
    from luban.bench.training_steps import step as benched

    return benched(args.what, args.dtype, args.quick)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{text!r} is no shape; write whole numbers of at least 1 with x between them")
    return sizes


def _listed() -> dict[str, Any]:
    """The tables' entries; `used` says whether this version would use one on this machine."""
    from luban import targets
    from luban.kernels.tuning.family import spaces
    from luban.runtime import schedules

    here = schedules.chip_of(targets.get("native"))
    entries = [
        {
            "workload": e.key.workload,
            "chip": e.key.chip,
            "space": e.key.space,
            "table": e.table,
            "used": e.key.chip == here and e.key.space in spaces(),
            **e.facts,
            "schedule": e.schedule,
        }
        for e in schedules.entries()
    ]
    return {"table": str(schedules.table_path()), "chip": here, "entries": entries}


def _cleared() -> dict[str, Any]:
    from luban.kernels.tuning import measured
    from luban.runtime import schedules

    measured.clear()
    return {"table": str(schedules.table_path()), "removed": schedules.clear()}


def text(result: dict[str, Any]) -> str:
    """The rows with their times, and where the schedules are kept."""
    if "removed" in result:
        return f"removed {result['removed']} schedules from {result['table']}"
    if "entries" in result:
        return _text_of_entries(result)
    lines = [["workload", "calls", "before us", "after us", "gain", "measured"]]
    for row in result["rows"]:
        if row["reached"]:
            times = [f"{row['before_us']:.1f}", f"{row['after_us']:.1f}", f"{row['gain']:.2f}x"]
            tried = f"{row['measured']}{' (all)' if row['ended'] == 'all' else ''}"
            lines.append([row["workload"], str(row["calls"]), *times, tried])
        else:
            lines.append([row["workload"], str(row["calls"]), "-", "-", "-", "no time left"])
    summary = result["summary"]
    told = [output.columns(lines), ""]
    if summary["changed"]:
        told.append(
            f"{summary['changed']} faster schedules are kept in {result['table']}; the next compilation uses them"
        )
        told.append(f"the workloads together: {summary['gain']:.2f}x")
    else:
        told.append("nothing faster was found; what is compiled stays as it is")
    if result.get("interrupted"):
        told.append("interrupted; the same command goes on where it was")
    return "\n".join(told)


def _text_of_entries(result: dict[str, Any]) -> str:
    entries = result["entries"]
    if not entries:
        return f"{result['table']}: no tuned schedules; `luban tune gemm 1024x1024x1024` makes one"
    lines = [["workload", "table", "before us", "after us", "gain", ""]]
    for e in entries:
        times = [f"{e[name]}" if name in e else "-" for name in ("before_us", "after_us", "gain")]
        lines.append([e["workload"], e["table"], *times, "" if e["used"] else "not used: another chip or version"])
    return f"{result['table']}\n{output.columns(lines)}"
