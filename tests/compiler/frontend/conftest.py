"""Runs what the importer makes through the reference interpreter, as a runtime would call it, beside eager."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch.utils import _pytree as pytree
from xdsl.dialects.builtin import ArrayAttr

from luban import symbolic
from luban.compiler.frontend.torch import import_graph, table
from luban.compiler.ir.attributes import Access, Dims, TensorType, contiguous
from luban.compiler.ir.graph import ReturnOp
from luban.compiler.ir.interpret_graph import find_function, run_graph
from luban.compiler.ir.numeric_types import to_torch
from luban.compiler.ir.text import verify

SEED = 1234


class Interpreted:
    """A program called as the runtime calls it: memory in, buffers out, windows on both."""

    def __init__(self, gm, name="main", **options):
        self.imported = import_graph(gm, name, **options)
        verify(self.imported.module)
        self.metadata = self.imported.metadata
        self.function = find_function(self.imported.module)
        last = self.function.body.block.last_op
        assert isinstance(last, ReturnOp)
        types = [v.type for v in last.values]
        last.properties["shapes"] = ArrayAttr([Dims(t.shape) for t in types])
        last.properties["accesses"] = ArrayAttr([Access.of(contiguous(t.shape)) for t in types])
        self.types = types

    def __call__(self, *args):
        args = [*args, *self.imported.constants]
        if self.metadata["inputs"] and self.metadata["inputs"][-1]["kind"] == "seed":
            args.append(torch.tensor(SEED))
        symbols = {s: self._symbol(where, args) for s, where in self.metadata["symbol_sources"].items()}
        assert list(symbols) == self.metadata["symbols"]
        dims = lambda values: tuple(symbolic.evaluate(symbolic.parse(v), symbols) for v in values)  # noqa: E731
        arrays = []
        for entry, arg in zip(self.metadata["inputs"], args, strict=True):
            if entry["kind"] in ("tensor", "seed"):
                kind = self.function.body.block.args[len(arrays)].type
                assert isinstance(kind, TensorType)
                shape = tuple(symbolic.evaluate(n, symbols) for n in kind.shape)
                if entry["kind"] == "tensor":
                    assert tuple(arg.shape) == dims(entry["shape"])
                    assert_strides(arg, dims(entry["strides"]))
                arrays.append(torch.as_strided(arg.detach(), shape, contiguous_ints(shape)))
        found = run_graph(self.imported.module, arrays, symbols)
        self.assigned = arrays
        return self._outputs(found, args, dims)

    def _symbol(self, where, args):
        value = args[where[1]]
        return int(value) if where[0] == "input" else value.shape[where[2]]

    def _outputs(self, found, args, dims):
        buffers, outputs, position = {}, [], 0
        for k, entry in enumerate(self.metadata["outputs"]):
            if entry["kind"] == "none":
                outputs.append(None)
                continue
            if entry["kind"] == "symbol":
                outputs.append(dims([entry["expr"]])[0])
                continue
            shape, strides, offset = dims(entry["shape"]), dims(entry["strides"]), dims([entry["offset"]])[0]
            if entry["kind"] == "buffer":
                dtype = getattr(torch, entry["dtype"])
                flat = to_torch(found[position], self.types[position].dtype, dtype).reshape(-1)
                if dtype is torch.bool:
                    flat = flat.bool()
                assert flat.dtype is dtype and flat.numel() == dims([entry["size"]])[0]
                position += 1
            elif "input" in entry:
                source = args[entry["input"]].detach()
                offset += source.storage_offset()
                flat = source
            else:
                flat = buffers[entry["output"]]
            buffers[k] = flat
            outputs.append(torch.as_strided(flat, shape, strides, offset))
        return outputs


def contiguous_ints(shape):
    return tuple(int(s) for s in contiguous(shape))


def assert_strides(tensor, strides):
    assert all(a == b or n in (0, 1) for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True)), (
        f"strides {tensor.stride()}, traced as {strides}"
    )


def compiler(made=None):
    """A forward or backward compiler for AOTAutograd that interprets what is imported."""

    def compile_one(gm, example_inputs):
        program = Interpreted(gm)
        if made is not None:
            made.append(program)
        return make_boxed_func(program)

    return compile_one


def close(ours, want, rtol, atol):
    assert ours.shape == want.shape and ours.dtype is want.dtype, (
        f"{ours.shape} {ours.dtype}, want {want.shape} {want.dtype}"
    )
    torch.testing.assert_close(ours.detach(), want.detach(), rtol=rtol, atol=atol, equal_nan=True, check_stride=False)


def leaves(value):
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def check():
    """check(f, *args): f through AOTAutograd, importer and interpreter equals eager, forward and (for inputs that
    require it) backward. Gives the programs that were made."""

    def run(f, *args, rtol=1e-5, atol=1e-6, dynamic=False, strides=True, backward=True):
        made = []
        for leaf in leaves(args):
            leaf.grad = None
        ours_args = pytree.tree_map_only(torch.Tensor, copied, args)
        compiled = aot_function(
            f,
            fw_compiler=compiler(made),
            bw_compiler=compiler(made),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=table(),
            dynamic=dynamic,
        )
        want, ours = f(*args), compiled(*ours_args)
        for a, b in zip(leaves(ours), leaves(want), strict=True):
            close(a, b, rtol, atol)
            if strides:
                assert_strides(a, b.stride())
        grads = [v for v in leaves(want) if v.requires_grad]
        if grads and backward:
            weights = [torch.randn_like(v) for v in grads]
            torch.autograd.backward(grads, weights)
            torch.autograd.backward([v for v in leaves(ours) if v.requires_grad], weights)
            for a, b in zip(leaves(ours_args), leaves(args), strict=True):
                assert (a.grad is None) == (b.grad is None)
                if b.grad is not None:
                    close(a.grad, b.grad, rtol, atol)
        return made

    return run


def copied(t):
    """A leaf with the same values, strides and requires_grad."""
    fresh = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    if t.is_leaf and not any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)):
        fresh.copy_(t.detach())
    else:
        fresh = t.detach().clone(memory_format=torch.preserve_format) if not t._is_view() else t.detach()
    return fresh.requires_grad_(t.requires_grad)


@pytest.fixture
def interpreted():
    return Interpreted


@pytest.fixture
def aot_compiler():
    return compiler


assert np.float32
