"""Different weights never share an identity; the same weights always do."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from sglang_tiered.integration.model_identity import digest_directory, identify_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}": torch.randn(64, 64, generator=generator) for i in range(12)}
    save_file(tensors, root / "model.safetensors")
    (root / "config.json").write_text('{"rope_theta": 10000}')
    return root


def test_copy_and_touch_keep_the_identity(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert digest_directory(model) == digest_directory(tmp_path / "copy")


@pytest.mark.parametrize("changed", range(12))
def test_one_retrained_tensor_changes_the_identity(model: Path, changed: int) -> None:
    before = digest_directory(model)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}": torch.randn(64, 64, generator=generator) for i in range(12)}
    tensors[f"layer.{changed}"] += 1e-3
    save_file(tensors, model / "model.safetensors")
    assert digest_directory(model) != before


def test_changed_configuration_changes_the_identity(model: Path) -> None:
    before = digest_directory(model)
    (model / "config.json").write_text('{"rope_theta": 20000}')
    assert digest_directory(model) != before


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x10" + bytes(7) + b"not json at all!"])
def test_broken_safetensors_header_is_sampled_all_the_same(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    first = digest_directory(model)
    (model / "model.safetensors").write_bytes(content + b"x")
    assert digest_directory(model) != first


def test_random_or_unknown_weights_are_shared_with_nobody(model: Path) -> None:
    dummy = [identify_model(str(model), None, "dummy") for _ in range(2)]
    assert dummy[0] != dummy[1]
    unknown = [identify_model("no/such-model", None, "auto") for _ in range(2)]
    assert unknown[0] != unknown[1]
    assert identify_model(str(model), None, "auto") == digest_directory(model)
