"""A model for tests: its configuration, and a tokenizer with one token a byte.

There is no weight file: the engine is started with ``--load-format dummy``. Every
ASCII character of a prompt is one token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HIDDEN = 64
LAYERS = 2
SPECIAL = ("<s>", "</s>", "<pad>")
EOS = 1
LORA_RANK = 4


def make_model(folder: Path) -> Path:
    """Write the model into ``folder``."""
    folder.mkdir(parents=True)
    vocabulary = [*SPECIAL, *_byte_alphabet()]
    ids = {"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 2}
    _write(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": HIDDEN // 2,
            "vocab_size": len(vocabulary),
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            **ids,
        },
    )
    _write(folder / "generation_config.json", ids)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[1],
            "pad_token": SPECIAL[2],
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write(folder / "tokenizer.json", _tokenizer(vocabulary))
    return folder


def make_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of the query projections, all zeros, into ``folder``."""
    folder.mkdir(parents=True)
    _write(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny",
            "r": LORA_RANK,
            "lora_alpha": LORA_RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
            "target_modules": ["q_proj"],
        },
    )
    shapes = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": shape
        for layer in range(LAYERS)
        for half, shape in (("A", (LORA_RANK, HIDDEN)), ("B", (HIDDEN, LORA_RANK)))
    }
    (folder / "adapter_model.safetensors").write_bytes(_zeros(shapes))
    return folder


def _zeros(shapes: dict[str, tuple[int, int]]) -> bytes:
    """Return a safetensors file: length of the header, the header in JSON, the tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(end)


def _tokenizer(vocabulary: list[str]) -> dict[str, Any]:
    bytes_as_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": text, "special": True, **special}
            for number, text in enumerate(SPECIAL)
        ],
        "pre_tokenizer": {**bytes_as_text, "use_regex": True},
        "decoder": bytes_as_text,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(vocabulary)},
            "merges": [],
        },
    }


def _byte_alphabet() -> list[str]:
    """Return a printable character for every byte, as byte-level BPE does (GPT-2's table)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
