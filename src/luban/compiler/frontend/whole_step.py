"""Forward, backward and the optimizer's update as one program.

The step is traced once with fake tensors (no Dynamo, no AOTAutograd: about a second for a small GPT); new values of
parameters, buffers and optimizer state are assigned to their old memory inside the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from luban.compiler.frontend.compile_fx import CompiledGraph, compile_fx
from luban.compiler.frontend.optimizers import rule_for
from luban.errors import ConfigError


class TrainStep:
    """Callable: `loss = step(*inputs)`; see `luban.train_step`. A new set of input shapes is compiled when it first comes."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable | None, optimizer: torch.optim.Optimizer, *, max_norm: float | None, target: str):
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.max_norm, self.target = max_norm, target
        self.rule = rule_for(optimizer)
        if max_norm is not None and not max_norm > 0:
            raise ConfigError(f"max_norm={max_norm} cannot clip gradients; give a positive number or None")
        names = {p: n for n, p in model.named_parameters()}
        self.groups: list[tuple[dict[str, Any], list[str]]] = []
        for group in optimizer.param_groups:
            held = [p for p in group["params"] if p.requires_grad]
            if any(p not in names for p in held):
                raise ConfigError("the optimizer holds a parameter that is not the model's; build it from model.parameters()")
            self.groups.append((group, [names[p] for p in held]))
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.steps = self._count_steps()
        self._programs: dict[Any, CompiledGraph] = {}
        self._used: list[str] | None = None

    def _count_steps(self) -> int:
        """Steps that the optimizer has made already (its state may come from a checkpoint)."""
        counts = {int(s["step"]) for s in self.optimizer.state.values() if "step" in s}
        if len(counts) > 1:
            raise ConfigError("the optimizer's parameters have made different numbers of steps; luban.train_step updates all of them together")
        momentum = any(s.get("momentum_buffer") is not None for s in self.optimizer.state.values())
        return counts.pop() if counts else int(momentum)

    def __call__(self, *inputs: Any) -> torch.Tensor:
        key = self._signature(inputs)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(inputs)
        self.steps += 1
        hyper = [number for group, _ in self.groups for number in self.rule.hyper(group, self.steps)]
        state = self._state()
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        values = [*self.parameters.values(), *self.buffers.values(), *state, torch.tensor(hyper, dtype=torch.float64), *tensors]
        (loss,) = program([v.detach() for v in values])
        self._record_steps()
        return loss

    def _signature(self, inputs: Sequence[Any]) -> Any:
        described = [(x.shape, x.dtype, x.stride()) if isinstance(x, torch.Tensor) else x for x in inputs]
        return (self.model.training, *described)

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
                        held[slot] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state.append(held[slot])
        return state

    def _record_steps(self) -> None:
        """Keeps the optimizer's own count, so that its state_dict can be saved and loaded as ever."""
        for group, names in self.groups:
            if "betas" not in group:
                continue
            for name in names:
                held = self.optimizer.state[self.parameters[name]]
                if "step" in held:
                    held["step"].fill_(float(self.steps))
                else:
                    held["step"] = torch.tensor(float(self.steps))

    def _compile(self, inputs: Sequence[Any]) -> CompiledGraph:
        graph, assigned = self._trace(inputs)
        return compile_fx(graph, self.target, "train_step", assigned=assigned)

    def _trace(self, inputs: Sequence[Any]) -> tuple[GraphModule, dict[int, int]]:
        """The step as a functional ATen graph, and which output is assigned to which input."""
        parameters, buffers, state = list(self.parameters.values()), list(self.buffers.values()), self._state()
        hyper = torch.zeros(sum(len(self.rule.hyper(g, 1)) for g, _ in self.groups), dtype=torch.float64)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        arguments = [v.detach() for v in (*parameters, *buffers, *state, hyper, *tensors)]
        targets: list[int] = []

        def step(*flat: torch.Tensor) -> list[torch.Tensor]:
            outputs, targets[:] = self._one_step(list(flat), inputs)
            return outputs

        graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
        if any(_mutates(node) for node in graph.graph.nodes):
            graph = make_fx(torch.func.functionalize(graph, remove="mutations_and_views"), tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
        graph.graph.eliminate_dead_code()
        return graph, {1 + i: at for i, at in enumerate(targets)}

    def _one_step(self, flat: list[torch.Tensor], inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]]:
        """What is traced: outputs are the loss and the new values; with each new value comes the input that it replaces."""
        n, m = len(self.parameters), len(self.buffers)
        leaves = {k: v.detach().requires_grad_(p.requires_grad) for (k, p), v in zip(self.parameters.items(), flat[:n])}
        buffers = {k: v.clone() for k, v in zip(self.buffers, flat[n : n + m])}
        count = sum(len(names) * len(self.rule.slots(group)) for group, names in self.groups)
        state, hyper = flat[n + m : n + m + count], flat[n + m + count]
        rest = iter(flat[n + m + count + 1 :])
        loss = self._loss({**leaves, **buffers}, [next(rest) if isinstance(x, torch.Tensor) else x for x in inputs])
        names = [name for _, listed in self.groups for name in listed]
        found = torch.autograd.grad(loss, [leaves[k] for k in names], allow_unused=True)
        with torch.no_grad():
            gradients = {k: g for k, g in zip(names, found) if g is not None}
            if self.max_norm is not None:
                gradients = clip(gradients, self.max_norm)
            outputs, targets = self._updates(flat[:n], gradients, state, hyper, base=n + m)
        for position, (k, old) in enumerate(zip(buffers, flat[n : n + m])):
            if buffers[k] is not old and buffers[k]._version:
                outputs.append(buffers[k])
                targets.append(n + position)
        return [loss.detach(), *outputs], targets

    def _loss(self, named: dict[str, torch.Tensor], inputs: list[Any]) -> torch.Tensor:
        *first, last = inputs
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


def _mutates(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
