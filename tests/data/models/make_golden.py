#!/usr/bin/env python3
"""Makes the tiny models of this folder and what transformers computes with them in fp32.

    make_golden.py [FOLDER]

Needs torch, transformers, tokenizers, safetensors and gguf from PyPI. For each of llama (Llama 3 RoPE scaling, untied, in
two shards), qwen2 (biases, tied) and qwen3 (QK norm, head size apart from hidden / heads):
  tiny-NAME/         Hugging Face folder, bf16 weights from a fixed seed
  tiny-NAME.gguf     the same weights; Q and K of llama interleaved as that format wants them
  tiny-NAME.golden   little-endian: u32 tokens, i32 ids[tokens], u32 rows, i32 row[rows], u32 vocabulary, f32 logits[rows][vocabulary]
"""
import json
import pathlib
import struct
import sys

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

ROWS = [0, 1, 17, 31, 32, 47]
TOKENS = 48
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
COMMON = dict(vocab_size=272, hidden_size=64, num_hidden_layers=2, max_position_embeddings=256, rms_norm_eps=1e-5,
              bos_token_id=256, eos_token_id=258)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=64), **COMMON)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(
        intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=100000.0), **COMMON)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0), **COMMON)),
}


def fill(model, seed):
    """Weights large enough that a wrong order, sign or scale anywhere moves the logits by far more than rounding."""
    rng = np.random.default_rng(seed)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            values = rng.uniform(0.5, 1.5, weight.shape)
        elif name.endswith("bias"):
            values = rng.normal(0, 0.5, weight.shape)
        else:
            values = rng.normal(0, 1.2 / np.sqrt(weight.shape[-1]), weight.shape)
        weight.data = torch.tensor(values, dtype=torch.bfloat16).float()


def make_tokenizer(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n")]
    for left, right in merges:
        vocab[left + right] = 260 + len(vocab) - 256
    specials = {256: "<|endoftext|>", 257: "<|im_start|>", 258: "<|im_end|>", 259: "<|reserved|>"}
    vocab.update({text: i for i, text in specials.items()})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<|endoftext|>", eos_token="<|im_end|>", add_bos_token=False,
        chat_template=TEMPLATE), indent=1) + "\n")
    tokens = [text for text, i in sorted(vocab.items(), key=lambda item: item[1])]
    return tokens, [f"{a} {b}" for a, b in merges], set(specials)


def interleave(weight, heads):
    """Rows i and i + half of each head side by side, as GGUF's llama wants them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name):
    for old, new in [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
                     ("model.layers.", "blk."), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
                     ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("self_attn.q_norm", "attn_q_norm"),
                     ("self_attn.k_norm", "attn_k_norm"), ("input_layernorm", "attn_norm"),
                     ("post_attention_layernorm", "ffn_norm"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
                     ("mlp.down_proj", "ffn_down")]:
        name = name.replace(old, new)
    return name


def write_gguf(path, arch, model, config, vocabulary, inv_freq):
    tokens, merges, specials = vocabulary
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    w = gguf.GGUFWriter(str(path), arch)
    w.add_name(f"tiny {arch}")
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(config.rope_parameters["rope_theta"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens + [f"<unused_{i}>" for i in range(len(tokens), config.vocab_size)])
    w.add_token_types([3 if i in specials else 1 if i < len(tokens) else 5 for i in range(config.vocab_size)])
    w.add_token_merges(merges)
    w.add_bos_token_id(256)
    w.add_eos_token_id(258)
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)
    if arch == "llama":
        # What the frequencies of plain RoPE are divided by.
        plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        w.add_tensor("rope_freqs.weight", (plain / inv_freq).astype(np.float32))
    for name, weight in model.named_parameters():
        values = weight.detach().numpy()
        if arch == "llama" and "q_proj" in name:
            values = interleave(values, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            values = interleave(values, config.num_key_value_heads)
        kind = gguf.GGMLQuantizationType.BF16 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        w.add_tensor(gguf_name(name), gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent
    for seed, (name, (kind, config)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = kind(config).float().eval()
        fill(model, seed)
        inv_freq = model.model.rotary_emb.inv_freq.numpy().copy()  # before it is rounded to bf16 with the weights
        ids = np.random.default_rng(100 + seed).integers(0, 256, TOKENS)
        with torch.no_grad():
            logits = model(torch.tensor(ids[None])).logits[0, ROWS].numpy().astype("<f4")
        (out / f"tiny-{name}.golden").write_bytes(
            struct.pack("<I", TOKENS) + ids.astype("<i4").tobytes() + struct.pack("<I", len(ROWS)) +
            np.array(ROWS, "<i4").tobytes() + struct.pack("<I", config.vocab_size) + logits.tobytes())
        folder = out / f"tiny-{name}"
        folder.mkdir(exist_ok=True)
        model.generation_config.bos_token_id, model.generation_config.eos_token_id = 256, [258, 256]
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="90KB" if name == "llama" else "1GB")
        vocabulary = make_tokenizer(folder)
        write_gguf(out / f"tiny-{name}.gguf", name, model.float(), config, vocabulary, inv_freq)
        print(name, "logits", logits.std(), "files", [p.name for p in sorted(folder.iterdir())])


main()
