"""Whole models: every AOT graph of the transformers that the benchmarks use imports, and computes what eager does."""

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from luban.compiler.frontend.torch import table

transformers = pytest.importorskip("transformers")


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=50,
        n_positions=12,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    x = torch.randint(0, 50, (2, 12))
    return transformers.GPT2LMHeadModel(config), (x,), lambda m, x: m(input_ids=x, labels=x).loss


def bert():
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=4,
    )
    x, y = torch.randint(0, 50, (3, 8)), torch.randint(0, 4, (3,))
    return transformers.BertForSequenceClassification(config), (x, y), lambda m, x, y: m(input_ids=x, labels=y).loss


def llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=24,
        intermediate_size=32,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=16,
        use_cache=False,
    )
    x = torch.randint(0, 50, (2, 12))
    return transformers.LlamaForCausalLM(config), (x,), lambda m, x: m(input_ids=x, labels=x).loss


def vit():
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=5,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    x, y = torch.randn(3, 3, 8, 8), torch.randint(0, 5, (3,))
    return transformers.ViTForImageClassification(config), (x, y), lambda m, x, y: m(pixel_values=x, labels=y).loss


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [gpt2, bert, llama, vit])
def test_loss_and_gradients_equal_eager(make, autocast, aot_compiler):
    torch.manual_seed(0)
    model, batch, loss_of = make()
    made = []
    backend = aot_autograd(
        fw_compiler=aot_compiler(made),
        bw_compiler=aot_compiler(made),
        decompositions=table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = torch.compile(model, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        want = loss_of(model, *batch)
        ours = loss_of(compiled, *batch)
    expected, found = gradients(model, want), gradients(model, ours)
    assert len(made) >= 2 and len(found) == len(expected)
    rtol, atol = (0.1, 4e-3) if autocast else (1e-4, 1e-6)
    torch.testing.assert_close(ours, want, rtol=rtol / 10, atol=atol)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
