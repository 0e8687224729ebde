"""The trained demo model: a true answer behind a document, and the same text out of NVMe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import ALWAYS, PAGE, ROOT, ask
from server_process import Server
from sglang_tiered.demo.server import TRAINED, demo_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

# About two prompts with their answers, and about four.
POOLS = ("--max-total-tokens", "1280", "--tier-host-bytes", "96MiB", *ALWAYS)
QUESTIONS = {"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo"}
LICENCE = re.sub(r"\s+", " ", (ROOT / "LICENSE").read_text(encoding="utf-8"))
CHAT = """\
<|im_start|>user
Read page {number} of a licence: {page}<|im_end|>
<|im_start|>assistant
I have read it. What is your question?<|im_end|>
<|im_start|>user
What is the capital of {country}?<|im_end|>
<|im_start|>assistant
"""
PROMPTS = [
    CHAT.format(number=number, page=LICENCE[number * 1500 :][:2600], country=country)
    for number, country in enumerate(QUESTIONS)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, made as ``scripts/serve`` makes it."""
    name, folder = demo_model(TRAINED)
    if name != TRAINED:
        pytest.skip(
            "NOT TESTED, the trained model: pip cannot fetch its wheel here, so the demo's server "
            "serves the random one (its sentence above says why)"
        )
    return folder


def test_answers_behind_a_document_are_true(trained: Path, tmp_path: Path) -> None:
    """Computed, and out of NVMe on another start."""
    flags = (*POOLS, "--tier-dir", str(tmp_path / "kv"))
    texts: dict[str, list[str]] = {"none": [], "storage": []}
    for tier, told in texts.items():
        server = Server.start(trained, tmp_path / f"{tier}.log", *flags)
        try:
            for prompt, word in zip(PROMPTS, QUESTIONS.values(), strict=True):
                body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
                answer = server.request("/generate", body)
                assert word in answer["text"], answer
                told.append(answer["text"])
                found = answer["meta_info"].get("cached_tokens_details") or {}
                num_whole = (answer["meta_info"]["prompt_tokens"] - 1) // PAGE * PAGE
                assert (found.get("storage") or 0) == num_whole * (tier == "storage")
                call = {"text": prompt, "tier": "nvme"}
                assert ask(server, "/tier/checkpoint", call)[0] == 200
        finally:
            server.kill()
    assert texts["none"] == texts["storage"]
