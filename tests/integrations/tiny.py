"""Tiny models of transformers, a text of numbers, and what it means that two models are equal."""

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import masterless as ml

COMMON = {"vocab_size": 128, "max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(seed=0, **options):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(**{**COMMON, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, **options})
    )


def gpt2(seed=0, **options):
    torch.manual_seed(seed)
    plain = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**plain, **no_dropout, **options}))


def moe(seed=0, **options):
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**COMMON, **sizes, **experts, **options}))


MODELS = {"llama": llama, "gpt2": gpt2, "moe": moe}
IDS = torch.arange(32).view(2, 16)


def examples(count=16, length=12, seed=0):
    """Sequences that a model can learn: each counts up from a random start."""
    starts = torch.randint(0, 100, (count, 1), generator=torch.Generator().manual_seed(seed))
    rows = (starts + torch.arange(length)) % 128
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def stored(tensor):
    """The plain tensors behind a parameter or buffer, by name."""
    if isinstance(tensor, ml.QuantizedTensor):
        return {"format": str(tensor.format), **tensor.detach().stored.tensors}
    return {"dense": tensor.detach()}


def differences(a: nn.Module, b: nn.Module) -> list[str]:
    """Names of parameters that are not the same to the bit; hidden bits count."""
    found = []
    for (name, p), (other, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        x, y = stored(p), stored(q)
        same = name == other and x.keys() == y.keys() and p.dtype == q.dtype
        same = same and all(torch.equal(x[k], y[k]) if torch.is_tensor(x[k]) else x[k] == y[k] for k in x)
        found += [] if same else [name]
    return found


def same_state(a, b) -> bool:
    """Whether two optimizers hold the same state to the bit."""
    x, y = a.state_dict()["state"], b.state_dict()["state"]
    return x.keys() == y.keys() and all(
        x[i].keys() == y[i].keys()
        and all(torch.equal(x[i][k], y[i][k]) if torch.is_tensor(x[i][k]) else x[i][k] == y[i][k] for k in x[i])
        for i in x
    )


def held_loss(model) -> float:
    """The loss on `examples(4, seed=1)`, computed without any tool."""
    rows = torch.stack([example["input_ids"] for example in examples(4, seed=1)])
    training = model.training
    with torch.no_grad():
        loss = model.eval()(input_ids=rows, labels=rows).loss.item()
    model.train(training)
    return loss


def tokenizer():
    """A tokenizer whose words are the numbers up to 127."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(128)}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="1", pad_token="0", unk_token="0")
