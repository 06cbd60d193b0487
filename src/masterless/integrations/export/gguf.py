"""GGUF: what llama.cpp and ollama read. Blocks of 32 with an fp16 scale, written as they are.

Contract:
    * Q4_0 holds integers of 2 to 4 bits, Q8_0 those of 6 and 8: value = d * q, d the block's scale. A group of 32 or
      more is several blocks with the same d. Nothing is quantized: llama.cpp's own converter would do it anew.
    * Refused: rows that are no multiple of 32, a scale that fp16 does not hold, floating formats, other architectures.
    * Every matrix is decoded again by the `gguf` package and compared with the forward pass's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from masterless.integrations.export.checkpoint import Matrix, Report, decoded, group_of, published, scales_of
from masterless.tensor.quantized import QuantizedTensor
from masterless.tensor.selection import owned_parameters

BLOCK = 32
FILE = "model.gguf"
# transformers' model type -> GGUF's name of the architecture, and of the way it splits text (llama.cpp's names)
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
PRE_TOKENIZERS = {"qwen3": "qwen2", "qwen3_moe": "qwen2"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def obstacle(name: str, module: nn.Module, q: QuantizedTensor) -> str:
    """Why a matrix cannot be written in blocks of GGUF without loss; empty if it can."""
    if type(module).__name__ == "Conv1D":
        return "its weight is [in, out] (Conv1D) and its scales run along the outputs; GGUF's run along the inputs"
    if q.format.kind != "linear":
        return f"GGUF has no block with the grid of '{q.format.family}'; integers of 2 to 8 bits fit"
    if q.shape[-1] % BLOCK:
        return f"a row of {q.shape[-1]} is not a whole number of blocks of {BLOCK}"
    group = group_of(q)
    if group is not None and group % BLOCK:
        return f"groups of {group} do not consist of blocks of {BLOCK}"
    scales = scales_of(q)
    if not torch.equal(scales.half().float(), scales):
        return "a scale is not exact in fp16 (2^-17 to 65504)"
    return ""


def write(model: Any, folder: Path, report: Report, source: Path | None) -> None:
    """Writes the file."""
    import gguf

    config = model.config
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"the names of {config.model_type!r} in GGUF are not known here; known: {', '.join(ARCHITECTURES)}. Export "
            f"dense and convert that with llama.cpp, which rounds anew"
        )
    architecture = ARCHITECTURES[config.model_type]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    writer = gguf.GGUFWriter(folder / FILE, architecture)
    _add_sizes(writer, config)
    _add_tokenizer(writer, config, source, report)
    for name, value in _stacked(published(model)).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"{name!r} has no place in a GGUF file of {architecture!r}; export dense")
        if architecture == "llama":
            value = _rotated(name, value, config)
        _add_tensor(writer, gguf, target, value)
    for name, _, _, p in owned_parameters(model):
        if isinstance(p, QuantizedTensor):
            report.exported[name] = str(p.format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- tensors --------------------------------------------------------------------------------------------------------


def _stacked(tensors: dict[str, Matrix | Tensor]) -> dict[str, Matrix | Tensor]:
    """The experts of a layer as one stack, which is how GGUF has them."""
    result: dict[str, Matrix | Tensor] = {}
    stacks: dict[str, list[Matrix | Tensor]] = {}
    for name, value in tensors.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            result[name] = value
            continue
        stack = stacks.setdefault(f"{found[1]}.{found[3]}.weight", [])
        stack.extend([None] * (int(found[2]) + 1 - len(stack)))  # type: ignore[list-item]
        stack[int(found[2])] = value
    for name, members in stacks.items():
        if all(isinstance(m, Matrix) for m in members):
            first: Any = members[0]
            codes, scales = (torch.stack([getattr(m, part) for m in members]) for part in ("codes", "scales"))
            result[name] = Matrix(codes, scales, first.format, first.group)
        else:
            result[name] = torch.stack(members)  # type: ignore[arg-type]
    return result


def _rotated(name: str, value: Matrix | Tensor, config: Any) -> Matrix | Tensor:
    """Rows of the query and key projections in llama.cpp's order: whole rows move, so no grid changes."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if f".{part}." in name), None)
    if count is None:
        return value

    def permuted(t: Tensor) -> Tensor:
        return t.reshape(count, 2, t.shape[0] // count // 2, *t.shape[1:]).swapaxes(1, 2).reshape(t.shape).contiguous()

    if isinstance(value, Matrix):
        return Matrix(permuted(value.codes), permuted(value.scales), value.format, value.group)
    return permuted(value)


def _add_tensor(writer: Any, gguf: Any, name: str, value: Matrix | Tensor) -> None:
    types = gguf.GGMLQuantizationType
    if isinstance(value, Matrix):
        kind = types.Q4_0 if value.format.bits <= 4 else types.Q8_0
        data = blocks_of(value)
        read = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).view(value.codes.shape)
        if not torch.equal(read, decoded(value, torch.float32)):
            raise ValueError(f"{name!r} does not come back from its GGUF blocks; report it with the model's config")
        writer.add_tensor(name, data, raw_dtype=kind)
    elif value.dtype == torch.bfloat16 and value.dim() > 1:
        writer.add_tensor(name, value.detach().contiguous().view(torch.uint8).numpy(), raw_dtype=types.BF16)
    else:  # vectors in fp32, as llama.cpp wants them
        writer.add_tensor(name, value.detach().float().contiguous().numpy())


def blocks_of(matrix: Matrix) -> np.ndarray[Any, Any]:
    """The bytes of a matrix (or a stack) in blocks of Q4_0 or Q8_0, ``[..., bytes of a row]``."""
    values = matrix.codes.to(torch.int16) - 2 ** (matrix.format.bits - 1)
    shape, cols = values.shape[:-1], values.shape[-1]
    repeats = (matrix.group or cols) // BLOCK
    scales = matrix.scales.repeat_interleave(repeats, dim=-1)[..., : cols // BLOCK]
    head = scales.half().unsqueeze(-1).contiguous().view(torch.uint8)
    blocks = values.view(*shape, cols // BLOCK, BLOCK)
    if matrix.format.bits <= 4:
        nibbles = (blocks + 8).to(torch.uint8)
        body = nibbles[..., :16] | (nibbles[..., 16:] << 4)
    else:
        body = blocks.to(torch.int8).view(torch.uint8)
    return torch.cat([head, body], dim=-1).view(*shape, -1).numpy()


# --- what else a file says ------------------------------------------------------------------------------------------


def _add_sizes(writer: Any, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type={rope['rope_type']!r}: scaled positions are not written here; export dense")
    writer.add_name(getattr(config, "name_or_path", "") or config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))))
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_tokenizer(writer: Any, config: Any, source: Path | None, report: Report) -> None:
    """The vocabulary of a byte-level BPE tokenizer, if the exported folder has one."""
    file = None if source is None else source / "tokenizer.json"
    about = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    model = about.get("model", {})
    if model.get("type") != "BPE":
        report.notes.append("no byte-level BPE tokenizer.json beside the model: the file has no vocabulary")
        writer.add_tokenizer_model("no_vocab")
        return
    import gguf

    by_id = {i: token for token, i in model["vocab"].items()}
    added = {entry["id"]: entry for entry in about.get("added_tokens", [])}
    tokens, kinds = [], []
    for i in range(config.vocab_size):
        if i in added:
            tokens.append(added[i]["content"])
            kinds.append(gguf.TokenType.CONTROL if added[i]["special"] else gguf.TokenType.USER_DEFINED)
        else:
            tokens.append(by_id.get(i, f"[PAD{i}]"))
            kinds.append(gguf.TokenType.NORMAL if i in by_id else gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    pre = PRE_TOKENIZERS.get(config.model_type)
    if pre is None:
        pre = "default"
        report.notes.append(f"llama.cpp is not told how {config.model_type!r} splits text: it takes its default")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    writer.add_token_merges(merges)
    for token, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        value = getattr(config, token, None)
        if isinstance(value, int):
            add(value)
