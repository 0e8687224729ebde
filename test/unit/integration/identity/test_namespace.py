"""Everything that changes the meaning of KV bytes changes the namespace, and what is said of a
handoff."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from host_pools import storage_config
from sglang.srt.arg_groups.fields.model import Model
from sglang.srt.arg_groups.fields.spec import Spec
from sglang.srt.runtime_context import get_context

from sglang_tiered.config import TransferConfig
from sglang_tiered.integration.identity import file_digests, namespace
from sglang_tiered.integration.identity.namespace_search import NamespaceSearch

TIMEOUT_S = 20.0
Identify = Callable[..., bytes]

INT8 = {"transfer_codec": "int8"}
DECODE, PREFILL = ({"disaggregation_mode": role} for role in ("decode", "prefill"))
IDENTITY: dict[str, Any] = {"model": "abc", "weight_version": "default", "tp": [0, 2]}


def make_pool(**changes: Any) -> SimpleNamespace:
    settings = {"dtype": torch.float16, "layout": "page_first", "page_size": 64}
    settings |= {"layer_num": 32, "head_num": 8, "head_dim": 128}
    return SimpleNamespace(**{**settings, **changes})


def spelled(identity: dict[str, Any] = IDENTITY, **pool: Any) -> str:
    return namespace.spell_out(identity, {"kv": namespace.describe_pool(make_pool(**pool))}, {})


GEOMETRY = {"dtype": torch.bfloat16, "layout": "page_first_direct", "page_size": 32}
GEOMETRY |= {"layer_num": 33, "head_num": 4, "head_dim": 64, "v_head_dim": 64, "start_layer": 1}
GEOMETRY |= {"storage_format_tag": "packed"}


@pytest.mark.parametrize("name", GEOMETRY)
def test_other_geometry_is_another_namespace(name: str) -> None:
    change = {name: GEOMETRY[name]}
    assert spelled(**change) != spelled()
    beside = {"kv": namespace.describe_pool(make_pool())}
    beside["swa"] = namespace.describe_pool(make_pool(**change))
    assert namespace.spell_out(IDENTITY, beside, {}) != spelled()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text("{}")
    (root / "model.safetensors").write_bytes(b"weights")
    return root


@pytest.fixture
def identify(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identify:
    """The namespace of a process with these settings, by SGLang's own published configuration."""
    # Tests of weight updates leave it set in a process that runs them, too.
    monkeypatch.setattr(namespace, "_files_are_old", False)

    def identify(make: Any = None, *, anew: bool = True, **settings: Any) -> bytes:
        if anew:  # as a process that has not looked at any file
            namespace._loaded_model.cache_clear()
            namespace._loaded_files.cache_clear()
        with get_context().override_server_args(**{"model_path": str(model), **settings}):
            identity = make() if make else namespace.server_identity(storage_config())
        found = NamespaceSearch(identity, {}, tmp_path / "kv", patience_s=TIMEOUT_S).answer
        assert found is not None
        return found

    return identify


@pytest.fixture
def handed(identify: Identify) -> Identify:
    """The digest that goes with a handoff of such a process."""

    def handed(
        name: str | None = None, kv: str = "bfloat16", *, draft: bool = False, **settings: Any
    ) -> bytes:
        return identify(lambda: namespace.handoff_identity(name, kv, with_draft=draft), **settings)

    return handed


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def adapter(path: Path) -> SimpleNamespace:
    return SimpleNamespace(lora_id="ab" * 16, lora_name="a", lora_path=str(path))


OF_FILES = [
    *("quantization_param_path", "decrypted_config_file", "decrypted_draft_config_file"),
    *("rl_quant_profile", "modelopt_checkpoint_restore_path", "kt_weight_path", "uno_lora_path"),
]


def settings_of(kind: str, folder: Path) -> dict[str, Any]:
    """With one that names a file or folder with weights."""
    if kind in OF_FILES:
        return {kind: str(folder / "model.safetensors")}
    if kind == "draft":
        return {"speculative_draft_model_path": str(folder)}
    if kind == "adapter":  # SGLang makes the id of one from its name and path alone
        return {"lora_paths": [adapter(folder)]}
    extra = {"qlora_adapter_name_or_path": str(folder)}
    return {"model_loader_extra_config": json.dumps(extra)}


SETTINGS = """
kv_cache_dtype=fp8_e5m2 dtype=float32 quantization=fp8 context_length=4096 weight_version=v2
json_model_override_args='{"rope_theta":1}' model_loader_extra_config='{"pattern":"x"}'
load_format=bitsandbytes model_impl=transformers modelopt_quant=fp8 quantize_and_serve=true
qsa_indexer_dtype=fp8_e4m3 custom_weight_loader=[a.b] rl_on_policy_target=fsdp
kt_method=AMXINT8 kt_num_gpu_experts=4 kt_max_deferred_experts_per_token=2
enable_w4a4_mxfp4_megamoe=true enforce_shared_experts_fusion=true mamba_ssm_dtype=bfloat16
prefill_kv_cache_dequant_dtype=bfloat16 enable_precise_embedding_interpolation=true
enable_tf32_matmul=true enable_decoder_swa_bounded_replay=true
flashinfer_a2a_dispatch_type=nvfp4 experts_shared_outer_loras=true
speculative_enable_w4a4_mxfp4_megamoe=true speculative_algorithm=EAGLE
speculative_draft_kv_cache_dtype=fp8_e4m3 speculative_draft_model_quantization=fp8
speculative_draft_window_size=128
"""


@pytest.mark.parametrize("setting", SETTINGS.split(), ids=lambda setting: setting.split("=")[0])
def test_every_meaningful_setting_is_in_the_identity(identify: Identify, setting: str) -> None:
    name, _, value = setting.partition("=")
    before = identify()
    assert identify() == before
    assert identify(**{name: yaml.safe_load(value)}) != before


@pytest.mark.parametrize("name", namespace._VARIABLES)
def test_variable_that_changes_numbers_counts(
    identify: Identify, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = identify()
    monkeypatch.setenv(
        name, '{"a": 1}' if "CONFIG" in name else "0" if "FP4_EXPERTS" in name else "1"
    )
    assert identify() != before


def test_settings_left_out_are_settings_that_sglang_has() -> None:
    """One that was renamed would come back under its new name."""
    apart = namespace._PLACES | namespace._FILES | namespace._WITHOUT_MEANING
    assert apart <= set(Model.__struct_fields__)


@pytest.mark.parametrize("kind", [*OF_FILES, "draft", "adapter", "adapter of the loader"])
def test_file_in_a_setting_counts_by_its_bytes(
    identify: Identify, tmp_path: Path, kind: str
) -> None:
    one, copy = (weights(tmp_path / name, b"old") for name in ("one", "copy"))
    before = identify(**settings_of(kind, one))
    assert identify(**settings_of(kind, one)) == before != identify()
    if kind in OF_FILES:
        assert identify(**settings_of(kind, copy)) == before, "wherever it lies"
    weights(one, b"new")
    assert identify(**settings_of(kind, one)) != before


@pytest.mark.parametrize(
    "settings",
    [{"load_format": "dummy"}, {"load_format": "remote_instance"}, {"weight_cache_mode": "client"}],
    ids=lambda settings: next(iter(settings)),
)
def test_weights_that_come_from_no_file_start_anew(
    identify: Identify, handed: Identify, settings: dict[str, Any]
) -> None:
    assert identify(**settings) != identify(**settings)
    assert handed(**settings) != handed(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "float32"}, {"quantization": "fp8"}, {"weight_version": "v2"}, {"kv": "float16"}],
    ids=lambda settings: next(iter(settings)),
)
def test_other_formats_are_another_model(
    handed: Identify, model: Path, settings: dict[str, Any]
) -> None:
    before = handed()
    assert handed() == before != handed(**settings)
    weights(model, b"retrain")
    assert handed() != before


def test_code_of_no_file_starts_anew(identify: Identify, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = [{"name": "x", "target_modules": ["model"], "hook_factory": "a:b"}]
    assert identify(forward_hooks=hooks) != identify(forward_hooks=hooks)
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "a.b")
    assert identify() != identify()


def test_storage_attached_again_ignores_new_files(
    identify: Identify, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named the KV of the loaded weights as that of the weights that lay there by then."""
    monkeypatch.setattr(file_digests, "SETTLED_NS", -1)
    (tmp_path / "kv").mkdir()
    draft, one = weights(tmp_path / "draft", b"old"), weights(tmp_path / "one", b"old")
    settings = {"speculative_draft_model_path": str(draft), "lora_paths": [adapter(one)]}
    loaded = identify(**settings)
    for folder in (model, draft, one):
        (folder / "model.safetensors").unlink()
        weights(folder, b"retrained")
    assert identify(anew=False, **settings) == loaded != identify(**settings)


def test_storage_attached_after_an_update_ignores_files(
    identify: Identify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace, "_files_are_old", False)
    assert identify() == identify()
    namespace.drop_digests()
    assert identify() != identify()


def test_renamed_sglang_setting_stops_the_server(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """An identity without it would let pages of another meaning be read."""
    name = "speculative_draft_kv_cache_dtype"
    with get_context().override_server_args(model_path=str(model)):
        spec = namespace.get_spec()
        kept = {each: getattr(spec, each) for each in Spec.__struct_fields__ if each != name}
        monkeypatch.setattr(namespace, "get_spec", lambda: SimpleNamespace(**kept))
        with pytest.raises(AttributeError, match=name):
            namespace.server_identity(storage_config())


def test_ranks_cut_otherwise_have_the_same_model(model: Path) -> None:
    """``--tp-size`` 1 hands over to 2, though neither finds the other's stored pages."""
    with get_context().override_server_args(model_path=str(model)):
        parts = namespace.server_identity(storage_config())
        handed = namespace.handoff_identity(None, "bfloat16", with_draft=True)
    geometry = {"tp", "pp", "attn_cp", "dcp"}
    assert geometry <= parts.keys()
    assert handed.keys() - {"kv_format"} == parts.keys() - geometry - {"adapters"}


def test_replay_of_windows_counts_in_a_handoff(handed: Identify) -> None:
    """Decode without it took windows that prefill had not written for those of a whole prompt."""
    replays = {value: handed(enable_decoder_swa_bounded_replay=value) for value in (None, 0, 1)}
    assert replays[None] == replays[0] != replays[1]


def test_draft_whose_kv_travels_counts(handed: Identify, tmp_path: Path) -> None:
    draft = weights(tmp_path / "draft", b"old")
    before = handed(draft=True, speculative_draft_model_path=str(draft))
    weights(draft, b"new")
    assert handed(draft=True, speculative_draft_model_path=str(draft)) != before


def test_declared_name_stands_for_the_files(handed: Identify, model: Path) -> None:
    before = handed("demo")
    weights(model, b"retrain")
    assert handed("demo") == before
    assert handed("demo", load_format="dummy") == before
    assert handed("other") != before
    assert handed("demo", "float16") != before, "bytes would be read as other numbers"
    assert handed("demo", weight_version="v2") != before


@pytest.mark.parametrize(
    ("role", "transfer", "received"),
    [
        (DECODE, TransferConfig(codec="zstd"), {}),
        (DECODE, TransferConfig(codec="int8"), INT8),
        (DECODE, TransferConfig(model_name="demo"), {"transfer_model": "demo"}),
        (PREFILL, TransferConfig(codec="int8", model_name="demo"), {}),
        (DECODE, None, {}),
        # Its tiers are open when it becomes decode, and their namespace is one for its life.
        ({**PREFILL, "enable_pd_role_switch": True}, TransferConfig(codec="int8"), INT8),
    ],
)
def test_received_kv_that_differs_is_kept_apart(
    role: dict[str, Any], transfer: TransferConfig | None, received: dict[str, Any]
) -> None:
    with get_context().override_server_args(**role):
        assert namespace.received_identity(transfer) == received
