"""The files of a model: the bytes that distinguish one set of weights from another.

KV computed by one set of weights must never be read by another, and neither a path nor a served
name distinguishes weights: people retrain in place and reuse names. So a model is the names and all
bytes of its files, wherever they are and whenever they were written. A loader's choice of files
depends on its format and on the model's own code, so the whole folder counts, with its subfolders,
except files that no loader reads. ``file_digests`` reads them, ``namespace_search`` decides when.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.integration.identity.file_digests import SeenFile, see

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


# Loaders whose weights are files of the model path. The others fetch them from elsewhere.
_FILE_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "flash_rl",
        "gguf",
        "instanttensor",
        "layered",
        "mistral",
        "npcache",
        "presharded",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    }
)
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"}
_CONFIGURATION_SUFFIXES = {".json", ".txt", ".model", ".yaml", ".py"}
_MEANINGLESS_SUFFIXES = {".gif", ".incomplete", ".jpeg", ".jpg", ".lock", ".log", ".md", ".pdf"}
_MEANINGLESS_SUFFIXES |= {".png", ".pyc", ".svg", ".tmp"}
# SGLang never loads them (``filter_files_not_needed_for_inference``).
_TRAINERS_FILES = {"optimizer.bin", "optimizer.pt", "scaler.pt", "scheduler.pt"}
_TRAINERS_FILES |= {"training_args.bin"}

UNRESOLVED = "unresolved-"
"""How an identity begins that no other process has."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileContents:
    """Files whose names and bytes are part of an identity, as they were when the model was loaded.
    ``what`` names them in messages."""

    what: str
    files: tuple[tuple[str, SeenFile], ...]

    def digest(self, digests: Mapping[SeenFile, bytes]) -> str:
        """Return one hexadecimal digest of the digests of all files. If one is missing, the
        identity is unique."""
        digest = hashlib.sha256(b"sglang-tiered model v2")
        for name, file in self.files:
            content = digests.get(file)
            if content is None:
                return unresolved(self.what, f"{file.path} changed since it was loaded")
            digest.update(_field(name.encode()) + _field(content))
        return digest.hexdigest()


def identify_model(
    path: str, revision: str | None, load_format: str, download_dir: str | None = None
) -> FileContents | str:
    """Return the files of the weights that ``path`` names. Call it once they are loaded.

    A hub name is resolved to its snapshot on this machine, as SGLang does: first in
    ``download_dir``, then in the hub's own cache. Weights cannot be identified if no file of them
    is found, or if they are random (``--load-format dummy``) or come from elsewhere. Then the
    identity is unique to this process: no page is shared across restarts, rather than shared
    wrongly.
    """
    if load_format not in _FILE_FORMATS:
        return unresolved(path, f"--load-format {load_format} does not read them from files")
    for root in _roots(path, revision, download_dir):
        files = _find_files(root)
        if any(_is_weight(file) for file in files.values()):
            break
    else:
        return unresolved(path, "no file of them is found")
    if download_dir is not None:
        # SGLang puts the weights there, but leaves the configuration to the hub's own cache.
        files = {**_configuration(path, revision), **files}
    return _see(path, files)


def identify_files(path: str | None) -> FileContents | str | None:
    """Return all bytes of the file or folder that a setting names; None if it is empty."""
    if not path:
        return None
    root = next(iter(_roots(path, None, None)), None)
    if root is None:
        return unresolved(path, "it is not found")
    return _see(path, _find_files(root))


def unresolved(what: str, why: str) -> str:
    """Return an identity that no other process has, and log why."""
    logger.warning(
        "%s cannot be identified (%s); the tiers start empty: pages stored before are not found, "
        "and pages stored now are not found after a restart; KV is handed over between servers "
        "with the same --transfer-model only",
        what,
        why,
    )
    return f"{UNRESOLVED}{uuid.uuid4().hex}"


def find_weight_files(
    path: str, revision: str | None, download_dir: str | None = None
) -> list[Path]:
    """Return the weight files that a model path names; empty if none is on this machine."""
    for root in _roots(path, revision, download_dir):
        files = [root] if root.is_file() else sorted(root.iterdir())
        if weights := [file for file in files if _is_weight(file)]:
            return weights
    return []


def one_copy(files: Sequence[Path]) -> list[Path]:
    """Return the weight files of one copy of the weights: a checkpoint may contain further copies,
    in other formats or (``consolidated``) in one piece."""
    by_suffix: dict[str, list[Path]] = {}
    for file in files:
        if not file.name.startswith("consolidated"):
            by_suffix.setdefault(file.suffix, []).append(file)

    def size(copy: list[Path]) -> int:
        return sum(file.stat().st_size for file in copy)

    return by_suffix.get(".safetensors") or max(by_suffix.values(), key=size, default=list(files))


def _roots(path: str, revision: str | None, download_dir: str | None) -> Iterator[Path]:
    """Yield the folders that may hold a path or a hub name, the likeliest first."""
    local = Path(os.path.expanduser(path))
    if local.exists():
        yield local
        return
    from huggingface_hub import snapshot_download

    for cache in dict.fromkeys((download_dir, None)):
        try:
            folder = snapshot_download(
                path, revision=revision, cache_dir=cache, local_files_only=True
            )
        except Exception:  # noqa: S112
            # Whatever the hub client raises means the same: the files are not there.
            continue
        yield Path(folder)


def _configuration(path: str, revision: str | None) -> dict[str, Path]:
    return {
        name: file
        for root in _roots(path, revision, None)
        for name, file in _find_files(root).items()
        if file.suffix in _CONFIGURATION_SUFFIXES
    }


def _find_files(root: Path) -> dict[str, Path]:
    """Return the files that may be part of a model, by their sorted names below its folder."""
    if root.is_file():
        beside = [root.with_name("config.json")] if root.suffix == ".gguf" else []
        return {file.name: file for file in (*beside, root) if file.is_file()}
    found: dict[str, Path] = {}
    visited = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        is_top = Path(folder) == root
        if (real := os.path.realpath(folder)) in visited:  # links may lead in circles
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if not _is_foreign(name, is_top=is_top))
        for name in names:
            file = Path(folder, name)
            if name.startswith(".") or name in _TRAINERS_FILES:
                continue
            if file.suffix.lower() not in _MEANINGLESS_SUFFIXES and file.is_file():
                found[file.relative_to(root).as_posix()] = file
    return dict(sorted(found.items()))


def _is_foreign(subfolder: str, *, is_top: bool) -> bool:
    """Return whether a subfolder is a cache, a second copy that SGLang does not download, or a
    trainer's state beside its result."""
    if subfolder.startswith((".", "__pycache__")):
        return True
    return is_top and (subfolder == "original" or subfolder.startswith("checkpoint-"))


def _is_weight(file: Path) -> bool:
    return file.suffix in _WEIGHT_SUFFIXES and file.is_file() and file.stat().st_size > 0


def _see(what: str, files: Mapping[str, Path]) -> FileContents | str:
    try:
        return FileContents(what, tuple((name, see(file)) for name, file in sorted(files.items())))
    except OSError as error:
        return unresolved(what, f"{error.filename} cannot be read: {error.strerror}")


def _field(content: bytes) -> bytes:
    """Prefix the length, so that joined fields cannot be confused."""
    return len(content).to_bytes(8, "little") + content
