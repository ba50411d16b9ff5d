"""Forward, backward and the optimizer's update as one program.

The step is traced once with fake tensors (no Dynamo, no AOTAutograd: about a second for a small GPT); new values of
parameters, buffers and optimizer state are assigned to their old memory inside the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from luban.compiler.frontend.compile_fx import CompiledGraph, compile_fx
from luban.compiler.frontend.dynamic_step import Guards, dynamic_dims, fake_arguments, guards_of
from luban.compiler.frontend.fuse_loss import WatchLoss
from luban.compiler.frontend.optimizers import rule_for, structure
from luban.compiler.frontend.source_places import source_places
from luban.compiler.frontend.step_errors import EAGER, step_errors
from luban.compiler.frontend.torch.decompositions import table
from luban.errors import ConfigError, UnsupportedOperatorError


class TrainStep:
    """Callable: `loss = step(*inputs)`; see `luban.train_step`. A new set of input shapes is compiled when it first comes."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable | None,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None,
        target: str,
        detect_nan: bool,
        fuse_cross_entropy: bool = False,
    ):
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.max_norm, self.target, self.detect_nan = max_norm, target, detect_nan
        self.watch_loss = WatchLoss if fuse_cross_entropy else nullcontext
        self.rule = rule_for(optimizer)
        if max_norm is not None and not max_norm > 0:
            raise ConfigError(f"max_norm={max_norm} cannot clip gradients; give a positive number or None")
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.groups = self._choose_groups()
        self.steps = self._count_steps()
        self._modules = list(model.modules())
        self._trainable = self._read_trainable()
        self._programs: dict[Any, list[tuple[Guards | None, CompiledGraph]]] = {}
        self._late: set[str] = set()  # parameters whose state begins after the others'

    def _read_trainable(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self.parameters.values())

    def _choose_groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """The optimizer's groups with the names of what they train."""
        names = {p: n for n, p in self.parameters.items()}
        groups = []
        for group in self.optimizer.param_groups:
            held = [p for p in group["params"] if p.requires_grad]
            if any(p not in names for p in held):
                raise ConfigError(
                    "the optimizer holds a parameter that is not the model's; build it from model.parameters()"
                )
            groups.append((group, [names[p] for p in held]))
        return groups

    def _count_steps(self) -> int:
        """Steps that the optimizer has made already (its state may come from a checkpoint)."""
        counts = {int(s["step"]) for s in self.optimizer.state.values() if "step" in s}
        if len(counts) > 1:
            raise ConfigError(
                "the optimizer's parameters have made different numbers of steps; luban.train_step updates all of them together"
            )
        momentum = any(s.get("momentum_buffer") is not None for s in self.optimizer.state.values())
        return counts.pop() if counts else int(momentum)

    def __call__(self, *inputs: Any) -> torch.Tensor:
        key = self._signature(inputs)
        count = self._steps_made() + 1
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        program = self._find(key, tensors) or self._compile(key, inputs)
        hyper = [number for group, _ in self.groups for number in self.rule.hyper(group, count)]
        state = self._state()
        values = [
            *self.parameters.values(),
            *self.buffers.values(),
            *state,
            torch.tensor(hyper, dtype=torch.float64),
            *tensors,
        ]
        (loss,) = program([v.detach() for v in values])
        self.steps = count  # a step that failed on bad data did not happen
        self._record_steps()
        return loss

    def _signature(self, inputs: Sequence[Any]) -> Any:
        """What a program was traced for: all that may change the operations of a step."""
        trainable = self._read_trainable()
        groups = self.optimizer.param_groups
        if (
            trainable != self._trainable
            or any(g is not held for g, (held, _) in zip(groups, self.groups))
            or len(groups) != len(self.groups)
        ):
            self._trainable, self.groups = trainable, self._choose_groups()
        described = [_described(i, x) for i, x in enumerate(inputs)]
        modes = tuple(m.training for m in self._modules)
        amp = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return (trainable, modes, amp, *(structure(g) for g, _ in self.groups), *described)

    def _steps_made(self) -> int:
        """Steps before this one; counted anew when somebody else stepped the optimizer or loaded its state."""
        first = next((self.parameters[n] for _, names in self.groups for n in names), None)
        held = self.optimizer.state.get(first) or {}
        if "step" in held:
            known = int(held["step"]) == self.steps
        else:
            known = held.get("momentum_buffer") is not None and self.steps > 0
        if not known:
            self.steps = self._count_steps()
        return self.steps

    def _state(self) -> list[torch.Tensor]:
        """Optimizer state of every parameter, made on first use, in the order of `groups`."""
        state = []
        for group, names in self.groups:
            slots = self.rule.slots(group)
            for name in names:
                p = self.parameters[name]
                held = self.optimizer.state[p]
                for slot in slots:
                    if held.get(slot) is None:
                        if self.steps and ("betas" in group or group.get("dampening")):
                            self._late.add(name)
                        held[slot] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state.append(held[slot])
        return state

    def _record_steps(self) -> None:
        """Keeps the optimizer's own count, so that its state_dict can be saved and loaded as ever."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn of a missing step
        for group, names in self.groups:
            if "betas" not in group:
                continue
            for name in names:
                held = self.optimizer.state[self.parameters[name]]
                if "step" in held:
                    held["step"].fill_(float(self.steps))
                else:
                    held["step"] = torch.tensor(float(self.steps))

    def _find(self, key: Any, tensors: Sequence[torch.Tensor]) -> CompiledGraph | None:
        """A program for inputs like these; one with open sizes if what it took for granted holds."""
        for guards, program in self._programs.get(key, ()):
            if guards is None or guards.hold(tensors):
                return program
        return None

    def _compile(self, key: Any, inputs: Sequence[Any]) -> CompiledGraph:
        try:
            guards, program = self._program(inputs)
        except UnsupportedOperatorError:
            guards, program = self._program_with_places(inputs)
        self._programs.setdefault(key, []).append((guards, program))
        return program

    def _program(self, inputs: Sequence[Any], places: bool = False) -> tuple[Guards | None, CompiledGraph]:
        with step_errors(inputs):
            graph, assigned, guards = self._trace(inputs, places)
        return guards, compile_fx(graph, self.target, "train_step", assigned=assigned, detect_nan=self.detect_nan)

    def _program_with_places(self, inputs: Sequence[Any]) -> tuple[Guards | None, CompiledGraph]:
        """The same, so that what it cannot compile is listed with the lines: only the message is worth their cost."""
        try:
            return self._program(inputs, places=True)
        except UnsupportedOperatorError as error:
            raise UnsupportedOperatorError(error.operators, EAGER) from None

    def _trace(self, inputs: Sequence[Any], places: bool = False) -> tuple[GraphModule, dict[int, int], Guards | None]:
        """The step as a functional ATen graph, which output is assigned to which input, and what open sizes must fulfil.

        places: every operator of the forward and the loss knows the line of the source that it comes from.
        """
        parameters, buffers, state = list(self.parameters.values()), list(self.buffers.values()), self._state()
        hyper = torch.zeros(sum(len(self.rule.hyper(g, 1)) for g, _ in self.groups), dtype=torch.float64)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        arguments = [v.detach() for v in (*parameters, *buffers, *state, hyper, *tensors)]
        targets: list[int] = []

        def step(*flat: torch.Tensor) -> list[torch.Tensor]:
            outputs, targets[:] = self._one_step(list(flat), inputs, places)
            return outputs

        mode = None
        if any(dynamic_dims(x) and x.is_contiguous() for x in tensors):
            mode, arguments = fake_arguments(arguments, tensors)
        graph = _traced(step, arguments, mode)
        if any(_mutates(node) for node in graph.graph.nodes):
            again = torch.fx.Interpreter(graph).run if places else graph  # an interpreter passes the places on
            with torch.fx.traceback.preserve_node_meta(places):
                graph = _traced(torch.func.functionalize(again, remove="mutations_and_views"), arguments, mode)
        kept = _drop_unchanged(graph, targets)
        guards = guards_of(mode, arguments, len(arguments) - len(tensors)) if mode is not None else None
        return graph, {1 + i: at for i, at in enumerate(kept)}, guards

    def _one_step(
        self, flat: list[torch.Tensor], inputs: Sequence[Any], places: bool
    ) -> tuple[list[torch.Tensor], list[int]]:
        """What is traced: outputs are the loss and the new values; with each new value comes the input that it replaces."""
        n, m = len(self.parameters), len(self.buffers)
        leaves = {k: v.detach().requires_grad_(p.requires_grad) for (k, p), v in zip(self.parameters.items(), flat[:n])}
        buffers = {k: v.clone() for k, v in zip(self.buffers, flat[n : n + m])}
        count = sum(len(names) * len(self.rule.slots(group)) for group, names in self.groups)
        state, hyper = flat[n + m : n + m + count], flat[n + m + count]
        rest = iter(flat[n + m + count + 1 :])
        named = {**leaves, **buffers}
        with source_places(places):
            loss = self._loss(named, [next(rest) if isinstance(x, torch.Tensor) else x for x in inputs])
        names = [name for _, listed in self.groups for name in listed]
        found = torch.autograd.grad(loss, [leaves[k] for k in names], allow_unused=True)
        with torch.no_grad():
            gradients = {k: g for k, g in zip(names, found) if g is not None}
            if self.max_norm is not None:
                gradients = clip(gradients, self.max_norm)
            outputs, targets = self._updates(flat[:n], gradients, state, hyper, base=n + m)
        outputs += [
            self._new_buffer(k, named[k]) for k in buffers
        ]  # those that did not change leave the graph in _trace
        targets += range(n, n + m)
        return [loss.detach(), *outputs], targets

    def _new_buffer(self, name: str, value: Any) -> torch.Tensor:
        """What a forward left in a buffer. Raises ConfigError for what does not fit the buffer's memory."""
        old = self.buffers[name]
        if not isinstance(value, torch.Tensor) or value.shape != old.shape or value.dtype != old.dtype:
            raise ConfigError(
                f"the model puts something other than a {old.dtype} tensor of shape {tuple(old.shape)} "
                f"into its buffer {name}; keep its shape and dtype"
            )
        return (
            value.detach().clone(memory_format=torch.contiguous_format)
            if value.stride() != old.stride()
            else value.detach()
        )

    def _loss(self, named: dict[str, torch.Tensor], inputs: list[Any]) -> torch.Tensor:
        *first, last = inputs
        with self.watch_loss():
            if self.loss_fn is None:
                loss = torch.func.functional_call(self.model, named, tuple(inputs))
            else:
                loss = self.loss_fn(torch.func.functional_call(self.model, named, tuple(first)), last)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError("the model (or loss_fn) must return one loss tensor with a single element")
        return loss

    def _updates(self, old: list[torch.Tensor], gradients: dict[str, torch.Tensor], state, hyper, base: int):
        outputs: list[torch.Tensor] = []
        targets: list[int] = []
        order = {k: i for i, k in enumerate(self.parameters)}
        cursor = number = 0
        for group, names in self.groups:
            width = len(self.rule.hyper(group, 1))
            numbers = [hyper[number + i] for i in range(width)]
            number += width
            slots = len(self.rule.slots(group))
            for name in names:
                if name in gradients:
                    if name in self._late:
                        raise ConfigError(
                            f"the parameter {name} starts training after {self.steps} steps of the others; "
                            "give it an optimizer and a training step of its own"
                        )
                    held = state[cursor : cursor + slots]
                    value, new = self.rule.update(group, old[order[name]], gradients[name], held, numbers)
                    outputs += [value, *new]
                    targets += [order[name], *(base + cursor + i for i in range(slots))]
                cursor += slots
        return outputs, targets


def clip(gradients: dict[str, torch.Tensor], max_norm: float) -> dict[str, torch.Tensor]:
    """Gradients scaled so that their total norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()])
    factor = torch.clamp(max_norm / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)
    return {k: g * factor for k, g in gradients.items()}


def _described(i: int, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dims = dynamic_dims(value)
        if dims and value.is_contiguous():
            return tuple(None if d in dims else n for d, n in enumerate(value.shape)), value.dtype, dims
        return value.shape, value.dtype, value.stride()
    try:
        hash(value)
    except TypeError:
        raise ConfigError(
            f"input {i} of the training step is a {type(value).__name__}; pass tensors, numbers or strings, one an argument"
        ) from None
    return type(value), value


def _traced(function: Callable, arguments: Sequence[torch.Tensor], mode: FakeTensorMode | None) -> GraphModule:
    """The function as a graph of operators that have import rules; with a mode, the arguments are its fake tensors."""
    trace = make_fx(
        function,
        decomposition_table=table(),
        tracing_mode="fake" if mode is None else "real",
        _allow_non_fake_inputs=True,
    )
    with enable_python_dispatcher(), torch.enable_grad(), mode or nullcontext():
        return trace(*arguments)


def _drop_unchanged(graph: GraphModule, targets: Sequence[int]) -> list[int]:
    """Removes outputs that only repeat the input that they would replace; gives the targets of the others."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    last = next(iter(reversed(graph.graph.nodes)))
    loss, *values = last.args[0]
    kept = [(v, at) for v, at in zip(values, targets, strict=True) if _source(v) is not inputs[at]]
    last.args = ([loss, *(v for v, _ in kept)],)
    graph.graph.eliminate_dead_code()
    return [at for _, at in kept]


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """What a node is a copy of."""
    while node.target in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _mutates(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
