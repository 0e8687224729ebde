"""Everything that changes the meaning of KV bytes changes the namespace."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sglang_tiered.integration import namespace

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY: dict[str, Any] = {"model": "abc", "weight_version": "default", "tp": [0, 2]}


def make_pool(**changes: Any) -> SimpleNamespace:
    settings = {
        "dtype": torch.float16,
        "layout": "page_first",
        "page_size": 64,
        "layer_num": 32,
        "head_num": 8,
        "head_dim": 128,
    }
    return SimpleNamespace(**{**settings, **changes})


def digest(identity: dict[str, Any] = IDENTITY, **pool: Any) -> bytes:
    return namespace.digest(identity, {"kv": namespace.describe_pool(make_pool(**pool))})


def test_same_meaning_has_the_same_namespace() -> None:
    assert digest() == digest() and len(digest()) == 32


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"layout": "page_first_direct"},
        {"page_size": 32},
        {"layer_num": 33},
        {"head_num": 4},
        {"head_dim": 64},
        {"v_head_dim": 64},
        {"start_layer": 1},
        {"storage_format_tag": "packed"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_geometry_is_another_namespace(change: dict[str, Any]) -> None:
    assert digest(**change) != digest()


@pytest.mark.parametrize(
    "change", [{"model": "abd"}, {"weight_version": "v2"}, {"tp": [1, 2]}, {"tp": [0, 1]}]
)
def test_other_identity_is_another_namespace(change: dict[str, Any]) -> None:
    assert digest({**IDENTITY, **change}) != digest()


def test_second_pool_is_part_of_the_namespace() -> None:
    one = {"kv": namespace.describe_pool(make_pool())}
    two = {**one, "swa": namespace.describe_pool(make_pool(layer_num=4))}
    assert namespace.digest(IDENTITY, one) != namespace.digest(IDENTITY, two)


def test_weights_changed_in_place_never_return_to_a_namespace() -> None:
    start = digest()
    seen = {start, *(namespace.successor(start) for _ in range(10))}
    assert len(seen) == 11


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, SimpleNamespace]:
    """SGLang's published configuration, with the fields it has in 0.5.23."""
    from sglang.srt import runtime_context

    (tmp_path / "config.json").write_text("{}")
    groups = {
        "get_model": SimpleNamespace(
            model_path=str(tmp_path),
            revision=None,
            load_format="auto",
            dtype="auto",
            quantization=None,
            kv_cache_dtype="fp8_e4m3",
            quantization_param_path=None,
            json_model_override_args="{}",
            context_length=None,
        ),
        "get_spec": SimpleNamespace(
            speculative_draft_model_path=None,
            speculative_draft_model_revision=None,
            speculative_draft_kv_cache_dtype=None,
            speculative_draft_model_quantization=None,
            speculative_algorithm=None,
        ),
        "get_lora": SimpleNamespace(lora_paths=None),
        "get_serving": SimpleNamespace(weight_version="default"),
    }
    for name, group in groups.items():
        monkeypatch.setattr(runtime_context, name, lambda group=group: group)
    return groups


RANKS = SimpleNamespace(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    dcp_rank=0,
    dcp_size=1,
)


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        ("get_model", "kv_cache_dtype", "fp8_e5m2"),  # the same storage type as fp8_e4m3
        ("get_model", "dtype", "float32"),
        ("get_model", "quantization", "fp8"),
        ("get_model", "quantization_param_path", "scales.json"),
        ("get_model", "json_model_override_args", '{"rope_theta": 1}'),
        ("get_model", "context_length", 4096),
        ("get_spec", "speculative_algorithm", "EAGLE"),
        ("get_spec", "speculative_draft_kv_cache_dtype", "fp8_e4m3"),
        ("get_spec", "speculative_draft_model_quantization", "fp8"),
        ("get_serving", "weight_version", "v2"),
    ],
)
def test_every_setting_that_gives_kv_its_meaning_is_in_the_identity(
    published: dict[str, SimpleNamespace], group: str, field: str, value: Any
) -> None:
    before = namespace.digest(namespace.server_identity(RANKS), {})
    assert namespace.digest(namespace.server_identity(RANKS), {}) == before
    setattr(published[group], field, value)
    assert namespace.digest(namespace.server_identity(RANKS), {}) != before


def test_setting_that_sglang_renamed_stops_the_server_instead_of_reading_as_absent(
    published: dict[str, SimpleNamespace],
) -> None:
    del published["get_model"].kv_cache_dtype
    with pytest.raises(AttributeError, match="kv_cache_dtype"):
        namespace.server_identity(RANKS)


def test_adapter_retrained_in_place_is_another_namespace(
    published: dict[str, SimpleNamespace], tmp_path: Path
) -> None:
    """SGLang makes the id of a ``--lora-paths`` adapter from its name and path alone, so KV of the
    old weights would be found under the new ones after a restart."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(b"old weights")
    published["get_lora"].lora_paths = [
        SimpleNamespace(lora_id="ab" * 16, lora_name="a", lora_path=str(adapter))
    ]
    before = namespace.digest(namespace.server_identity(RANKS), {})
    assert namespace.digest(namespace.server_identity(RANKS), {}) == before
    weights.write_bytes(b"new weights")
    assert namespace.digest(namespace.server_identity(RANKS), {}) != before


def test_adapters_and_the_base_model_have_page_keys_of_their_own() -> None:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.sampling.sampling_params import SamplingParams

    tokens = array("q", range(128))

    def page_keys(adapter: str | None, tenant: str | None) -> tuple[str, ...]:
        request = Req(
            "r", "", tokens, SamplingParams(), lora_id=adapter, extra_key=tenant, vocab_size=320
        )
        key = RadixKey(tokens, extra_key=request.extra_key, cache_salt=request.cache_salt)
        return tuple(get_storage_hash_str(key, None, page_size=64))

    askers = [(None, None), ("a" * 32, None), ("b" * 32, None), ("a" * 32, "t"), (None, "t")]
    keys = [page_keys(*asker) for asker in askers]
    assert all(len(pages) == 2 for pages in keys)
    assert len({page for pages in keys for page in pages}) == 2 * len(askers)
