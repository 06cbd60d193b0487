"""LoRA on a frozen INT4 base: train adapters with 8-bit states, merge them, say what rounding took.

Run it with ``python examples/lora.py --steps 200 --rank 16 --out merged``: a tiny Llama over bytes of Python's
documentation. It needs ``pip install 'masterless[hf]'``.
"""

import argparse
import pydoc_data.topics
from collections.abc import Sequence

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import masterless as ml
from masterless.integrations.lora import merge_lora_


def batches(steps: int, length: int = 64) -> list[torch.Tensor]:
    """Rows of bytes."""
    topics = pydoc_data.topics.topics
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    starts = torch.randint(len(text) - length, (steps, 8), generator=torch.Generator().manual_seed(0))
    return [torch.stack([text[i : i + length] for i in row]) for row in starts.tolist()]


def main(arguments: Sequence[str] | None = None) -> float:
    """Quantize, adapt, train, merge; returns the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--merge-into", default="int8", help="format of the merged matrices: INT4 would lose adapters")
    parser.add_argument("--out", help="folder for the merged model")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    ml.quantize_(base, "int4")  # or from_pretrained(..., quantization_config=MasterlessConfig("int4"))

    model = peft.get_peft_model(base, peft.LoraConfig(r=options.rank, target_modules="all-linear"))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    opt = ml.AdamW(trainable, lr=3e-3, exp_avg="int8", exp_avg_sq="log8")
    for step, rows in enumerate(batches(options.steps)):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")

    merged, report = merge_lora_(model, options.merge_into)
    print(report)
    if options.out:
        merged.save_pretrained(options.out)

    return loss.item()


if __name__ == "__main__":
    main()
