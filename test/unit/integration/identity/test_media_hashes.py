"""What a client says that its images hash to never reaches a page key, unless it is trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)

from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode
from sglang_tiered.flags import MiB

OF_ANOTHER = 0x1234
VOCABULARY = 128
IMAGE = {"format": "processor_output", "feature": [1], "hash": OF_ANOTHER, "pad_value": 7}

Configure = Callable[..., None]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Makes this process a server's."""
    disagg = SimpleNamespace(language_model_only=False, language_only=False)
    monkeypatch.setattr(tokenizer_manager, "get_disagg", lambda: disagg)

    def configure(mode: TierMode = TierMode.NVME, **more: Any) -> None:
        sizes = {"capacity_bytes": 64 * MiB, "region_bytes": 4 * MiB}
        nvme = NvmeConfig(directory="/kv", **sizes, **more) if mode is TierMode.NVME else None
        environment: dict[str, str] = {}
        TieredConfig(mode=mode, nvme=nvme).to_environment(environment)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return configure


def tokenized(**request: Any) -> tuple[MultimodalDataItem, Any]:
    """The image of a request after SGLang's own tokenizer manager, hooked as in a server, and what
    the model's processor was given for it."""
    seen: list[Any] = []

    async def process(image_data: Any, **_: Any) -> MultimodalProcessorOutput:
        seen.append(image_data)
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.arange(4.0))
        return MultimodalProcessorOutput(mm_items=[item], input_ids=[1, 2])

    manager: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["M"]), vocab_size=VOCABULARY
        ),
        mm_processor=SimpleNamespace(process_mm_data_async=process, prefer_tokenized_input=False),
        max_req_input_len=100,
        _validate_mm_limits=lambda obj: None,
        _normalize_mm_content_hashes=lambda obj: None,
        _validate_one_request=lambda obj, ids: None,
        _create_tokenized_object=lambda obj, text, ids, embeds, mm_inputs, types: mm_inputs,
    )
    obj = GenerateReqInput(**{"input_ids": [1, 2], **request})
    work = tokenizer_manager.TokenizerManager._tokenize_one_request(manager, obj)
    (item,) = asyncio.run(work).mm_items
    return item, seen[0]


def test_client_hashes_never_replace_an_images_own(configure: Configure) -> None:
    configure()
    item, _ = tokenized(image_data="image", mm_hashes=[f"{OF_ANOTHER:x}"])
    assert item.hash is None, "SGLang computes it from the image"
    item.set_pad_value()
    other, _ = tokenized(image_data="image")
    other.set_pad_value()
    assert item.padding_values() == other.padding_values()


@pytest.mark.parametrize("images", [IMAGE, [IMAGE], [[IMAGE, "image"]]])
def test_image_object_loses_its_client_hash(configure: Configure, images: Any) -> None:
    configure()
    _, given = tokenized(image_data=images)
    assert str(OF_ANOTHER) not in str(given) and "pad_value" not in str(given)
    assert "feature" in str(given)
    assert IMAGE["hash"] == OF_ANOTHER, "the caller's own object stays as it is"


@pytest.mark.parametrize("mode", ["trusting", TierMode.HOST])
def test_trusted_hashes_and_untiered_servers_are_untouched(configure: Configure, mode: Any) -> None:
    if mode == "trusting":
        configure(trust_mm_hashes=True)
    else:
        configure(mode)
    item, given = tokenized(image_data=[IMAGE], mm_hashes=[f"{OF_ANOTHER:x}"])
    assert item.hash == OF_ANOTHER
    assert given == [IMAGE]


def stand_in() -> int:
    """The placeholder of an image in page keys, which any holder of the image can compute."""
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.arange(4.0))
    item.set_pad_value()
    return int(item.pad_value)


def requests_with_stand_ins() -> list[dict[str, Any]]:
    image = {"format": "processor_output", "feature": [1]}
    return [
        {"input_ids": [1, *[stand_in()] * 3, 2]},
        {"input_ids": [1, 2, -1]},
        {"input_ids": [1, 2, stand_in() + (1 << 32)]},
        {"image_data": ["image", {**image, "input_ids": [[1, 2], [3, stand_in()]]}]},
        {"image_data": [{**image, "input_ids": torch.tensor([[1, stand_in()]])}]},
        {"image_data": [{**image, "input_ids": [[1], stand_in()]}]},
    ]


@pytest.mark.parametrize("request_", requests_with_stand_ins())
def test_placeholder_tokens_in_a_request_are_refused(
    configure: Configure, request_: dict[str, Any]
) -> None:
    """Text requests that held them stored pages, which requests with the image then found."""
    configure()
    with pytest.raises(ValueError, match="input_ids holds .* which is not a token of the model"):
        tokenized(**{"image_data": "image", **request_})
    tokenized(input_ids=[VOCABULARY - 1, VOCABULARY], image_data="image")
    configure(trust_mm_hashes=True)
    tokenized(**{"image_data": "image", **request_})


def test_batch_with_one_placeholder_token_is_refused(configure: Configure) -> None:
    configure()
    batch = GenerateReqInput(input_ids=[[3, stand_in()], [1, 2]])
    batch.normalize_batch_and_arguments()
    manager: Any = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))
    manager._batch_has_text = lambda *_: False
    tokenize = tokenizer_manager.TokenizerManager._tokenize_one_request
    manager._tokenize_one_request = lambda obj: tokenize(manager, obj)
    work = tokenizer_manager.TokenizerManager._batch_tokenize_and_process(manager, 2, batch)
    with pytest.raises(ValueError, match=f"input_ids holds {stand_in()}, which is not a token"):
        asyncio.run(work)
