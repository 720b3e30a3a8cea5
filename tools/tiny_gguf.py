"""Write a tiny model with random weights as a GGUF file, for tests of a real llama-server.

Its tokens are all bytes and all printable characters of ASCII. A prompt has a token for each letter, and two more, for its
beginning and the blank before it.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, INNER, CONTEXT = 4, 256, 4, 768, 8192
KIND = gguf.TokenType
TOKENS = (
    (b"<unk>", KIND.UNKNOWN),
    (b"<s>", KIND.CONTROL),
    (b"</s>", KIND.CONTROL),
    *((f"<0x{byte:02X}>".encode(), KIND.BYTE) for byte in range(256)),
    *((chr(code).encode(), KIND.NORMAL) for code in range(0x21, 0x7F)),
    # The blank.
    ("\u2581".encode(), KIND.NORMAL),
)
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd": (len(TOKENS), WIDTH),
        "output": (len(TOKENS), WIDTH),
        "output_norm": (WIDTH,),
    }
    for layer in range(LAYERS):
        parts = {
            **dict.fromkeys(("attn_norm", "ffn_norm"), (WIDTH,)),
            **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH)),
            **dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, WIDTH)),
            "ffn_down": (WIDTH, INNER),
        }
        found |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    return found


def main(path: str) -> None:
    """Write the model to ``path``."""
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("tiny")
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(WIDTH // HEADS)
    out.add_vocab_size(len(TOKENS))
    out.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    out.add_tokenizer_model("llama")
    out.add_tokenizer_pre("default")
    out.add_token_list([text for text, _ in TOKENS])
    out.add_token_scores([-float(number) for number in range(len(TOKENS))])
    out.add_token_types([kind for _, kind in TOKENS])
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(CHAT)
    random = np.random.default_rng(7)
    for name, shape in shapes().items():
        if len(shape) == 1:
            weights = np.ones(shape, dtype=np.float32)
        else:
            weights = (random.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float16)
        out.add_tensor(f"{name}.weight", weights)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    main(sys.argv[1])
