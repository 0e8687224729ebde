"""Different weights never share an identity; the same weights always do."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import huggingface_hub
import pytest

from sglang_tiered.integration.identity.file_digests import FileDigests
from sglang_tiered.integration.identity.model import (
    FileContents,
    find_weight_files,
    identify_model,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    (root / "model.safetensors").write_bytes(b"weights")
    (root / "config.json").write_text('{"rope_theta": 10000}')
    return root


def name(identity: FileContents | str | None) -> str:
    """What an identity comes to once its files are read."""
    if not isinstance(identity, FileContents):
        return str(identity)
    files = [file for _, file in identity.files]
    return identity.digest(FileDigests(Path("/nonexistent")).read(files, threading.Event()))


def digest(path: Path | str, load_format: str = "auto", download_dir: Path | None = None) -> str:
    place = None if download_dir is None else str(download_dir)
    return name(identify_model(str(path), None, load_format, place))


def is_unresolved(identity: str) -> bool:
    return identity.startswith("unresolved-")


def test_shards_that_changed_places_are_another_model(model: Path) -> None:
    one, two = (model / f"model-rank-{number}-part-0.safetensors" for number in (0, 1))
    one.write_bytes(b"one")
    two.write_bytes(b"two")
    before = digest(model, "sharded_state")
    one.write_bytes(b"two")
    two.write_bytes(b"one")
    assert digest(model, "sharded_state") != before


@pytest.mark.parametrize(
    "path",
    [
        *("model.safetensors", "config.json", "experts.kt", "transformer/part.safetensors"),
        *("vision_encoder/deep/part.safetensors", "presharded/tp2/part.safetensors"),
    ],
)
def test_every_file_that_a_loader_reads_counts(model: Path, path: str) -> None:
    write(model / path, b"old")
    before = digest(model)
    write(model / path, b"new")
    assert digest(model) != before


def write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def test_links_are_followed_and_may_lead_in_circles(model: Path, tmp_path: Path) -> None:
    before = digest(model)
    (model / "loop").symlink_to(model)
    assert digest(model) == before
    blob = tmp_path / "blob"
    shutil.move(model / "model.safetensors", blob)
    (model / "model.safetensors").symlink_to(blob)
    assert digest(model) == before


def test_quantised_file_of_its_own_is_a_model(tmp_path: Path) -> None:
    one, two = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    write(one, b"GGUF one")
    write(two, b"GGUF two")
    write(two.with_name("somebody's notes.txt"), b"notes")
    assert digest(one, "gguf") != digest(two, "gguf")
    write(two, b"GGUF one")
    assert digest(one, "gguf") == digest(two, "gguf")


def test_weights_not_read_from_files_are_unique(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = tmp_path / "empty"
    write(empty / "config.json", b"{}")
    write(empty / "empty.safetensors", b"")
    none, own = "no file of them is found", "--load-format {} does not read them"
    for where, load_format, why in (
        (empty, "auto", none), ("no/such-model", "auto", none),
        *((model, each, own.format(each)) for each in ("new", "remote", "private")),
    ):  # fmt: skip
        caplog.clear()
        names = {digest(where, load_format) for _ in range(2)}
        assert len(names) == 2 and all(map(is_unresolved, names))
        assert why in caplog.text and "start empty" in caplog.text


def test_weights_changed_during_the_read_are_unique(model: Path) -> None:
    identity = identify_model(str(model), None, "auto")
    (model / "config.json").write_text('{"rope_theta": 20000}')
    names = {name(identity) for _ in range(2)}
    assert len(names) == 2 and all(map(is_unresolved, names))


def put_into_hub(cache: Path, files: dict[str, bytes], commit: str = "c" * 40) -> None:
    """A snapshot as ``huggingface_hub`` leaves it: links into a folder of blobs."""
    repo = cache / "models--org--model"
    write(repo / "refs" / "main", commit.encode())
    for file, content in files.items():
        blob = repo / "blobs" / f"{hash((file, content)):x}"
        write(blob, content)
        link = repo / "snapshots" / commit / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's own cache."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


CONFIG, OLD, NEW = {"config.json": b"{}"}, {"m.safetensors": b"old"}, {"m.safetensors": b"new"}


def test_hub_name_is_the_files_of_its_snapshot(hub: Path, tmp_path: Path) -> None:
    put_into_hub(hub, {**CONFIG, **OLD})
    local = tmp_path / "local"
    for file, content in {**CONFIG, **OLD}.items():
        write(local / file, content)
    assert digest("org/model") == digest(local)
    put_into_hub(hub, {**CONFIG, **NEW}, "d" * 40)
    assert digest("org/model") != digest(local)


def test_download_folder_precedes_the_hub_cache(hub: Path, tmp_path: Path) -> None:
    put_into_hub(hub, {**CONFIG, **OLD})
    old = digest("org/model")
    put_into_hub(tmp_path / "other", NEW)
    new = digest("org/model", download_dir=tmp_path / "other")
    assert new != old and not is_unresolved(new)
    assert find_weight_files("org/model", None, str(tmp_path / "other"))[0].read_bytes() == b"new"
    # SGLang takes what there is, and the configuration from the hub's cache.
    assert digest("org/model", download_dir=tmp_path / "absent") == old
    put_into_hub(hub, {"config.json": b'{"rope_theta": 1}'}, "d" * 40)
    assert digest("org/model", download_dir=tmp_path / "other") != new
