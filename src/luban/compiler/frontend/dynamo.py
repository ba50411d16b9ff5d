"""The torch.compile backend "luban": forward and backward through AOTAutograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._dynamo import disable
from torch._dynamo.utils import flatten_graph_inputs
from torch._functorch import config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from luban.compiler.frontend.compile_fx import CompiledGraph, compile_fx
from luban.compiler.frontend.equal_values import merge_equal_values
from luban.compiler.frontend.fallback import compile_with_fallback
from luban.compiler.frontend.frames import watch
from luban.compiler.frontend.kept_sums import keep_sums
from luban.compiler.frontend.no_tangents import Tangents
from luban.compiler.frontend.norm_values import expose_norm_values
from luban.compiler.frontend.shown_errors import call_showing_errors
from luban.compiler.frontend.torch.decompositions import table
from luban.errors import ConfigError
from luban.runtime import arena, memory, pools

OPTIONS = {"fallback": "allow", "target": "native", "fuse_cross_entropy": False}


def luban_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **_: Any
) -> Callable:
    """Compiles a Dynamo graph. Options: `fallback` ("allow" or "error"), `target` (a name of luban.targets) and
    `fuse_cross_entropy` (True never writes the logits of a last linear layer, see fuse_loss.py)."""
    return call_showing_errors(partial(_compile, options), gm, example_inputs)


watch(luban_backend)


def _compile(options: dict[str, Any] | None, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
    chosen = read_options(options)
    compiler = partial(_compile_part, chosen)
    if chosen["fuse_cross_entropy"]:
        from luban.compiler.frontend.fuse_loss import fuse_losses

        fuse_losses(gm)
    _give_idle_memory_back()
    tangents = Tangents()
    trace = partial(
        _trace,
        fw_compiler=partial(compiler, "forward"),
        bw_compiler=_untraced(partial(compiler, "backward", tangents=tangents)),
        inference_compiler=partial(compiler, "inference"),
        partition_fn=_partition,
        decompositions=table(),
    )
    with _without_onednn():
        return tangents.forward(trace(gm, example_inputs))


def _trace(gm: GraphModule, example_inputs: Sequence[Any], **compilers: Any) -> Callable:
    """torch._dynamo.backends.common.aot_autograd without its import of Inductor's debugger (4 MB resident)."""
    if any(isinstance(x, (list, tuple, dict)) for x in example_inputs):
        return flatten_graph_inputs(gm, example_inputs, partial(_trace, **compilers))
    return disable(aot_module_simplified(gm, example_inputs, **compilers), reason="it is compiled already")


def _untraced(compiler: Callable) -> Callable:
    """A compiler that Dynamo does not trace, nor what it makes: backwards run, and compile, inside of traced calls too."""

    def made_untraced(*args: Any) -> Callable:
        return disable(compiler(*args), reason="it is compiled already")

    # the whole of it, at once: a backward compiles inside of frames that Dynamo looks at
    untraced = disable(made_untraced, reason="a compiler")
    untraced._is_wrapped_bw_compiler = True
    return untraced


def _give_idle_memory_back() -> None:
    """Lets go of what no program uses now, so that a compilation between steps does not come on top of it.

    Tracing BERT anew takes 38 MB for a while; the 300 MB that fault in again afterwards take 0.1 s.
    """
    pools.outputs.trim(keep=0)
    arena.release()


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """While it is on, recurrent layers are traced as oneDNN's own operators (torch.backends.mkldnn.flags warns of TF32)."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _partition(joint: GraphModule, inputs: Any, **arguments: Any) -> tuple[GraphModule, GraphModule]:
    """Splits forward from backward by a minimum cut, and lets the backward compute every pointwise value again.

    torch's defaults keep long pointwise chains and values that are used far apart, for kernels that could not fuse them
    into what reads them. Ours do: on GPT-2 tanh is computed again in the store of a product, and 161 MB are kept, not 238.
    """
    keep_sums(joint.graph)
    expose_norm_values(joint.graph)
    merge_equal_values(joint.graph)
    with config.patch(
        cse=False,
        ban_recompute_used_far_apart=False,
        ban_recompute_long_fusible_chains=False,
        ban_recompute_materialized_backward=False,
    ):
        return min_cut_rematerialization_partition(joint, inputs, **arguments)


def read_options(options: dict[str, Any] | None) -> dict[str, Any]:
    """The options with their defaults. Raises ConfigError for one that does not exist or a wrong value."""
    unknown = sorted(set(options or {}) - set(OPTIONS))
    if unknown:
        raise ConfigError(f"the backend luban has no option {unknown[0]!r}; it takes {', '.join(OPTIONS)}")
    chosen = {**OPTIONS, **(options or {})}
    if chosen["fallback"] not in ("allow", "error"):
        raise ConfigError(f'fallback={chosen["fallback"]!r} is not known; use "allow" or "error"')
    if not isinstance(chosen["fuse_cross_entropy"], bool):
        raise ConfigError(f"fuse_cross_entropy={chosen['fuse_cross_entropy']!r} is not known; use True or False")
    return chosen


def _compile_part(
    options: dict[str, Any],
    part: str,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    tangents: Tangents | None = None,
) -> Callable:
    saved_from = _user_outputs() if part == "forward" else None
    run = compile_fx if options["fallback"] == "error" else compile_with_fallback
    compiled = run(gm, options["target"], part, saved_from)
    if part == "backward" and isinstance(compiled, CompiledGraph):
        compiled.donate(_take_donated())
    return _boxed(compiled if tangents is None else tangents.backward(gm, compiled))


def _boxed(compiled: Callable[[list], Sequence[Any]]) -> Callable[[list], Sequence[Any]]:
    """A plain function marked as boxed: AOTAutograd does not see the mark on other callables.

    Its first call ends with a trim of the heap: tracing leaves free memory all over it (29 MB on BERT), which would stay
    beside the activations for the rest of the training.
    """
    traced = [True]

    def call(args: list) -> Sequence[Any]:
        results = compiled(args)
        if traced:
            traced.clear()
            memory.trim_heap()
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _take_donated() -> list[int]:
    """The backward's inputs that only it can see.

    AOTAutograd forgets them: it refuses any later backward that keeps the graph, and ours looks at each call.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return []
    found, metadata.bw_donated_idxs = metadata.bw_donated_idxs or [], []
    return found


def _user_outputs() -> int | None:
    """How many outputs of the forward graph being compiled go to the caller; the others are kept for the backward."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return metadata.num_forward_returns if metadata is not None else None
