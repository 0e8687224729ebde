"""What a model's weights are, as a digest that does not read them all.

KV computed by one set of weights must never be read by another (DESIGN promise 1), and a path or a
served name does not tell weights apart: people retrain in place and reuse names. Hashing 100 GB at
every start would cost minutes, so the digest covers every configuration file whole, and of every
weight file its name, its size and samples: one block inside each tensor of a safetensors file (its
header lists them; training changes every tensor it touches nearly everywhere), evenly spaced blocks
of any other format. Modification times are left out on purpose: containers fetch the same weights
anew at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["digest_directory", "find_weight_files", "identify_model"]

SAMPLE_BYTES = 4096
SAMPLE_STRIDE_BYTES = 4 << 20
MAX_SAFETENSORS_HEADER_BYTES = 100 << 20

_CONFIGURATION_SUFFIXES = {".json", ".txt", ".model", ".yaml", ".py"}
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"}


def identify_model(path: str, revision: str | None, load_format: str) -> str:
    """A digest of the weights that ``path`` names, as hexadecimal.

    Local directories and files are sampled; a hub name is resolved to its local snapshot, which
    exists once the model is loaded. Where no weights can be found, or they are random
    (``--load-format dummy``), the identity is unique to this process: nothing is shared across
    restarts, rather than shared wrongly.
    """
    if load_format == "dummy":
        return f"dummy-{uuid.uuid4().hex}"
    local = _resolve(path, revision)
    if local is None:
        return f"unresolved-{uuid.uuid4().hex}"
    return digest_directory(local)


def digest_directory(root: Path) -> str:
    """The digest of a model directory, or of a single weight file. Reads samples only."""
    digest = hashlib.sha256(b"sglang-tiered model v1")
    files = [root] if root.is_file() else sorted(p for p in root.iterdir() if p.is_file())
    for file in files:
        if file.suffix in _CONFIGURATION_SUFFIXES:
            content = file.read_bytes()
            digest.update(_field(file.name.encode()) + _field(content))
        elif file.suffix in _WEIGHT_SUFFIXES:
            size = file.stat().st_size
            digest.update(_field(file.name.encode()) + size.to_bytes(8, "little"))
            with file.open("rb") as stream:
                for offset in _sample_offsets(file, stream, size):
                    stream.seek(offset)
                    digest.update(_field(stream.read(SAMPLE_BYTES)))
    return digest.hexdigest()


def find_weight_files(path: str, revision: str | None) -> list[Path]:
    """The weight files that a model path names; empty where there are none on this machine."""
    root = _resolve(path, revision)
    if root is None:
        return []
    files = [root] if root.is_file() else sorted(file for file in root.iterdir() if file.is_file())
    return [file for file in files if file.suffix in _WEIGHT_SUFFIXES]


def _resolve(path: str, revision: str | None) -> Path | None:
    local = Path(os.path.expanduser(path))
    if local.exists():
        return local
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception:
        # Whatever the hub client raises, the answer is the same: these weights are not known.
        return None


def _sample_offsets(file: Path, stream: BinaryIO, size: int) -> list[int]:
    """Where to read: inside each tensor where the header tells, else at a fixed stride."""
    strided = [*range(0, size, SAMPLE_STRIDE_BYTES), max(0, size - SAMPLE_BYTES)]
    if file.suffix != ".safetensors" or size < 8:
        return strided
    (header_bytes,) = struct.unpack("<Q", stream.read(8))
    if header_bytes > min(size - 8, MAX_SAFETENSORS_HEADER_BYTES):
        return strided
    try:
        header = json.loads(stream.read(header_bytes))
        data = 8 + header_bytes
        middles = [
            data + (tensor["data_offsets"][0] + tensor["data_offsets"][1]) // 2
            for name, tensor in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return strided
    # The header itself names and shapes the tensors, so its start is sampled too.
    return [0, *sorted(middles)]


def _field(content: bytes) -> bytes:
    """Length-prefixed, so that joined fields cannot be confused."""
    return len(content).to_bytes(8, "little") + content
