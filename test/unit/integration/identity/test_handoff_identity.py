"""What must be equal on two servers that hand KV over, and what may differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from host_pools import storage_config
from sglang.srt.runtime_context import get_context

from sglang_tiered.config import TransferConfig
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.identity.namespace_search import NamespaceSearch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TIMEOUT_S = 20.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text("{}")
    (root / "model.safetensors").write_bytes(b"weights")
    return root


@pytest.fixture
def identify(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """The digest that goes with a handoff, by SGLang's own published configuration."""
    monkeypatch.setattr(namespace, "_files_are_old", False)  # as another test may leave it

    def identify(
        name: str | None = None, kv: str = "bfloat16", *, draft: bool = False, **settings: Any
    ) -> bytes:
        with get_context().override_server_args(**{"model_path": str(model), **settings}):
            identity = namespace.handoff_identity(name, kv, with_draft=draft)
        answer = NamespaceSearch(identity, {}, tmp_path / "kv", patience_s=TIMEOUT_S).answer
        assert answer is not None
        return answer

    return identify


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def adapter(path: Path) -> SimpleNamespace:
    return SimpleNamespace(lora_id=path.name * 8, lora_name="a", lora_path=str(path))


def test_weights_of_equal_shape_are_other_weights(
    identify: Callable[..., bytes], model: Path
) -> None:
    before = identify()
    assert identify() == before
    weights(model, b"retrain")
    assert identify() != before


def test_ranks_cut_otherwise_have_the_same_model(model: Path) -> None:
    """``--tp-size`` 1 hands over to 2, though neither finds the other's stored pages."""
    with get_context().override_server_args(model_path=str(model)):
        parts = namespace.server_identity(storage_config())
        handed = namespace.handoff_identity(None, "bfloat16", with_draft=True)
    geometry = {"tp", "pp", "attn_cp", "dcp"}
    assert geometry <= parts.keys()
    assert handed.keys() - {"kv_format"} == parts.keys() - geometry - {"adapters"}


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "float32"}, {"quantization": "fp8"}, {"weight_version": "v2"}, {"kv": "float16"}],
    ids=lambda settings: next(iter(settings)),
)
def test_other_formats_are_another_model(
    identify: Callable[..., bytes], settings: dict[str, Any]
) -> None:
    assert identify(**settings) != identify()


def test_speculation_without_kv_may_differ(identify: Callable[..., bytes]) -> None:
    assert identify(speculative_algorithm="NGRAM") == identify()


def test_draft_whose_kv_travels_counts(identify: Callable[..., bytes], tmp_path: Path) -> None:
    draft = weights(tmp_path / "draft", b"old")
    before = identify(draft=True, speculative_draft_model_path=str(draft))
    weights(draft, b"new")
    assert identify(draft=True, speculative_draft_model_path=str(draft)) != before


def test_adapters_are_no_part_of_the_model(identify: Callable[..., bytes], tmp_path: Path) -> None:
    """They go with the requests that use them."""
    assert identify(lora_paths=[adapter(weights(tmp_path / "one", b"adapter"))]) == identify()


def test_declared_name_stands_for_the_files(identify: Callable[..., bytes], model: Path) -> None:
    before = identify("demo")
    weights(model, b"retrain")
    assert identify("demo") == before
    assert identify("demo", load_format="dummy") == before
    assert identify("other") != before
    assert identify("demo", "float16") != before, "bytes would be read as other numbers"
    assert identify("demo", weight_version="v2") != before


def test_weights_in_no_file_have_no_equal(identify: Callable[..., bytes]) -> None:
    assert identify(load_format="dummy") != identify(load_format="dummy")


@pytest.mark.parametrize(
    ("role", "transfer", "received"),
    [
        ("decode", TransferConfig(), {}),
        ("decode", TransferConfig(codec="zstd"), {}),
        ("decode", TransferConfig(codec="int8"), {"transfer_codec": "int8"}),
        ("decode", TransferConfig(model_name="demo"), {"transfer_model": "demo"}),
        ("prefill", TransferConfig(codec="int8", model_name="demo"), {}),
        ("decode", None, {}),
    ],
)
def test_received_kv_that_differs_is_kept_apart(
    role: str, transfer: TransferConfig | None, received: dict[str, Any]
) -> None:
    with get_context().override_server_args(disaggregation_mode=role):
        assert namespace.received_identity(transfer) == received


def test_server_that_may_receive_stores_apart_at_once() -> None:
    """Its tiers are open when it becomes decode, and their namespace is one for its life."""
    transfer = TransferConfig(codec="int8")
    for role in ("prefill", "decode"):
        with get_context().override_server_args(
            disaggregation_mode=role, enable_pd_role_switch=True
        ):
            assert namespace.received_identity(transfer) == {"transfer_codec": "int8"}
