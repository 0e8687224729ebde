"""Everything that changes the meaning of KV bytes changes the namespace."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from host_pools import storage_config
from sglang.srt import runtime_context
from sglang.srt.arg_groups.fields.model import Model
from sglang.srt.arg_groups.fields.spec import Spec
from sglang.srt.runtime_context import get_context

from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.identity.namespace_search import NamespaceSearch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TIMEOUT_S = 20.0
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


def test_weights_changed_in_place_get_new_namespaces() -> None:
    start = digest()
    seen = {start, *(namespace.successor(start) for _ in range(10))}
    assert len(seen) == 11


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text("{}")
    (root / "model.safetensors").write_bytes(b"weights")
    return root


@pytest.fixture
def identify(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """The namespace of a process with these settings, by SGLang's own published configuration."""
    # Tests of weight updates leave it set in a process that runs them, too.
    monkeypatch.setattr(namespace, "_files_are_old", False)

    def identify(**settings: Any) -> bytes:
        with get_context().override_server_args(**{"model_path": str(model), **settings}):
            identity = namespace.server_identity(storage_config())
        answer = NamespaceSearch(identity, {}, tmp_path / "kv", patience_s=TIMEOUT_S).answer
        assert answer is not None
        return answer

    return identify


def adapter(path: Path) -> SimpleNamespace:
    return SimpleNamespace(lora_id="ab" * 16, lora_name="a", lora_path=str(path))


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"dtype": "float32"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"context_length": 4096},
        {"load_format": "bitsandbytes"},
        {"model_loader_extra_config": '{"pattern": "x"}'},
        {"model_impl": "transformers"},
        {"modelopt_quant": "fp8"},
        {"quantize_and_serve": True},
        {"qsa_indexer_dtype": "fp8_e4m3"},
        {"custom_weight_loader": ["a.b"]},
        {"kt_method": "AMXINT8"},
        {"kt_num_gpu_experts": 4},
        {"kt_max_deferred_experts_per_token": 2},
        {"enable_w4a4_mxfp4_megamoe": True},
        {"enforce_shared_experts_fusion": True},
        {"mamba_ssm_dtype": "bfloat16"},
        {"prefill_kv_cache_dequant_dtype": "bfloat16"},
        {"speculative_algorithm": "EAGLE"},
        {"speculative_draft_kv_cache_dtype": "fp8_e4m3"},
        {"speculative_draft_model_quantization": "fp8"},
        {"speculative_draft_window_size": 128},
        {"weight_version": "v2"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_meaningful_setting_is_in_the_identity(
    identify: Callable[..., bytes], settings: dict[str, Any]
) -> None:
    assert identify() == identify()
    assert identify(**settings) != identify()


@pytest.mark.parametrize(
    "settings",
    [
        {"download_dir": "/somewhere"},
        {"weight_loader_disable_mmap": True},
        {"modelopt_export_path": "/somewhere"},
        {"startup_weight_load_mode": "overlap"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_loading_options_do_not_change_the_identity(
    identify: Callable[..., bytes], settings: dict[str, Any]
) -> None:
    assert identify(**settings) == identify()


def test_settings_left_out_are_settings_that_sglang_has() -> None:
    """One that was renamed would come back under its new name."""
    apart = namespace._PLACES | namespace._FILES | namespace._WITHOUT_MEANING
    assert apart <= set(Model.__struct_fields__)


@pytest.mark.parametrize(
    "setting",
    [
        "quantization_param_path",
        "decrypted_config_file",
        "decrypted_draft_config_file",
        "rl_quant_profile",
        "modelopt_checkpoint_restore_path",
        "kt_weight_path",
        "uno_lora_path",
    ],
)
def test_file_in_a_setting_counts_by_its_bytes(
    identify: Callable[..., bytes], tmp_path: Path, setting: str
) -> None:
    files = [tmp_path / folder / "file" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(b"scales")
    one, two = (identify(**{setting: str(file)}) for file in files)
    assert one == two != identify()
    files[1].write_bytes(b"other scales")
    assert identify(**{setting: str(files[1])}) != one


def test_adapter_of_the_loader_counts_by_bytes(
    identify: Callable[..., bytes], tmp_path: Path
) -> None:
    adapter = tmp_path / "qlora"
    adapter.mkdir()
    (adapter / "adapter_model.bin").write_bytes(b"old")
    config = json.dumps({"qlora_adapter_name_or_path": str(adapter)})
    before = identify(model_loader_extra_config=config)
    assert identify(model_loader_extra_config=config) == before
    (adapter / "adapter_model.bin").write_bytes(b"new")
    assert identify(model_loader_extra_config=config) != before


def test_draft_model_counts_by_its_bytes(identify: Callable[..., bytes], tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"old")
    before = identify(speculative_draft_model_path=str(draft))
    assert identify(speculative_draft_model_path=str(draft)) == before != identify()
    (draft / "model.safetensors").write_bytes(b"new")
    assert identify(speculative_draft_model_path=str(draft)) != before


@pytest.mark.parametrize(
    "settings",
    [{"load_format": "dummy"}, {"load_format": "remote_instance"}, {"weight_cache_mode": "client"}],
    ids=lambda settings: next(iter(settings)),
)
def test_weights_that_come_from_no_file_start_anew(
    identify: Callable[..., bytes], settings: dict[str, Any]
) -> None:
    assert identify(**settings) != identify(**settings)


def test_folder_without_weights_starts_anew(identify: Callable[..., bytes], model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert identify() != identify()


def test_storage_attached_after_an_update_ignores_files(
    identify: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace, "_files_are_old", False)
    assert identify() == identify()
    namespace.drop_digests()
    assert identify() != identify()


def test_renamed_sglang_setting_stops_the_server(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    with get_context().override_server_args(model_path=str(model)):
        spec = {
            name: getattr(runtime_context.get_spec(), name)
            for name in Spec.__struct_fields__
            if name != "speculative_draft_kv_cache_dtype"
        }
        monkeypatch.setattr(runtime_context, "get_spec", lambda: SimpleNamespace(**spec))
        with pytest.raises(AttributeError, match="speculative_draft_kv_cache_dtype"):
            namespace.server_identity(storage_config())


def test_adapter_retrained_in_place_is_another_namespace(
    identify: Callable[..., bytes], tmp_path: Path
) -> None:
    """SGLang makes the id of a ``--lora-paths`` adapter from its name and path alone, so KV of the
    old weights would be found under the new ones after a restart."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"old weights")
    before = identify(lora_paths=[adapter(folder)])
    assert identify(lora_paths=[adapter(folder)]) == before
    weights.write_bytes(b"new weights")
    assert identify(lora_paths=[adapter(folder)]) != before


def test_adapters_and_base_model_share_no_page_key() -> None:
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
