"""graph.attention and its gradients against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luban.compiler.ir.interpret_graph import run_graph

B, H, Q, K, D = 2, 3, 5, 7, 4
SCALE = 0.5


def eager(q, k, v, bias, causal):
    scores = SCALE * q @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(~torch.ones(Q, K).tril().bool(), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def head_strides(length):
    """(batch, length, head, feature) in memory, as projections are, read as (batch, head, position, feature)."""
    return [length * H * D, D, H * D, 1]


def program(ir, name, operands, results, causal, element):
    values = {f"%v{i}": ir.tensor(shape, kind or element) for i, (shape, kind, _) in enumerate(operands)}
    outs = [ir.tensor(shape, kind or element) for shape, kind in results]
    properties = {
        "domain": f"#graph.dims<{ir.dims([B, H, Q, K, D])}>",
        "accesses": "[" + ", ".join(ir.access(strides) for _, _, strides in operands) + "]",
        "scale": f"{SCALE} : f64",
        "causal": str(causal).lower(),
    }
    names = [f"%r{i}" for i in range(len(outs))]
    text = ir.op(name, names, list(values.items()), properties, outs)
    returned = [(n, t, shape) for n, t, (shape, _) in zip(names, outs, results, strict=True)]
    return ir.module(ir.function(values, text, returned))


def arrays(with_bias):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(B, n, H, D, generator=generator, dtype=torch.float64) for n in (Q, K, K)]
    bias = torch.randn(B, 1, Q, K, generator=generator, dtype=torch.float64)
    return [*made, bias] if with_bias else made


BIAS = ([B, 1, Q, K], None, [Q * K, 0, K, 1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_forward_and_backward_against_torch(ir, causal, with_bias):
    given = arrays(with_bias)
    q, k, v, *bias = given
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    out, lse = eager(*leaves, bias[0] if bias else None, causal)
    operands = [([B, n, H, D], None, head_strides(n)) for n in (Q, K, K)] + ([BIAS] if with_bias else [])
    m = program(ir, "graph.attention", operands, [([B, H, Q, D], None), ([B, H, Q], "f32")], causal, "f64")
    got = run_graph(m, given)
    np.testing.assert_allclose(got[0], out.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got[1], lse.detach().numpy(), rtol=1e-6)

    grad = torch.randn(B, H, Q, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out.backward(grad)
    rows, keys = [B, H, Q, D], [B, H, K, D]
    dense = [(grad.numpy(), rows), (leaves[0], rows), (leaves[1], keys), (leaves[2], keys), (out, rows)]
    operands = [(shape, None, ir.contiguous(shape)) for _, shape in dense]
    operands += [([B, H, Q], "f32", [H * Q, Q, 1])] + ([BIAS] if with_bias else [])
    m = program(ir, "graph.attention_backward", operands, [(rows, None), (keys, None), (keys, None)], causal, "f64")
    for g, leaf in zip(run_graph(m, [x for x, _ in dense] + [got[1]] + bias), leaves, strict=True):
        np.testing.assert_allclose(g, leaf.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_query_without_keys_gives_zero_and_no_gradient(ir):
    q, k, v, bias = (x.float() for x in arrays(True))
    bias[0, 0, 2] = float("-inf")
    operands = [([B, n, H, D], None, head_strides(n)) for n in (Q, K, K)] + [BIAS]
    m = program(ir, "graph.attention", operands, [([B, H, Q, D], None), ([B, H, Q], "f32")], False, "f32")
    out, lse = run_graph(m, [q, k, v, bias])
    assert not out[0, :, 2].any() and np.isneginf(lse[0, :, 2]).all()
    assert np.isfinite(out).all() and np.isfinite(np.delete(lse, 2, axis=2)).all()
    rows, keys = [B, H, Q, D], [B, H, K, D]
    operands = [(rows, None, ir.contiguous(rows)), *operands[:3], (rows, None, ir.contiguous(rows))]
    operands += [([B, H, Q], "f32", [H * Q, Q, 1]), BIAS]
    m = program(ir, "graph.attention_backward", operands, [(rows, None), (keys, None), (keys, None)], False, "f32")
    got = run_graph(m, [np.ones(rows, np.float32), q, k, v, out, lse, bias])
    assert all(np.isfinite(g).all() for g in got) and not got[0][0, :, 2].any()
