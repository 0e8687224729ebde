"""The trained demo model: a true answer behind a document, and the same text from every tier."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from conftest import ALWAYS, PAGE, ROOT, ask
from server_process import Server
from sglang_tiered.demo.server import TRAINED, demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

# About two prompts with their answers, and about four.
POOLS = ("--max-total-tokens", "1280", "--tier-host-bytes", "96MiB", *ALWAYS)
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Spain?": "Madrid",
    "What is the capital of Greece?": "Athens",
}
NUM_NEW = 16


def prompts() -> list[str]:
    """A piece of the licence that was read, and a question, as the model's chat template has it."""
    text = re.sub(r"\s+", " ", (ROOT / "LICENSE").read_text(encoding="utf-8"))
    chats = []
    for number, question in enumerate(QUESTIONS):
        turns = (
            ("user", f"Read page {number} of a licence: {text[number * 1500 :][:2600]}"),
            ("assistant", "I have read it. What is your question?"),
            ("user", question),
        )
        chat = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
        chats.append(f"{chat}<|im_start|>assistant\n")
    return chats


PROMPTS = prompts()


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


class Life:
    """One server at a time, on one bucket."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self.computed: list[str] = []
        self.start("kv", has_bucket=True)

    def start(self, directory: str, *, has_bucket: bool) -> None:
        self.directory = directory
        bucket = ("--tier-object-url", str(self._folder / "bucket"))
        self.server = Server.start(
            self._model,
            self._folder / f"{directory}.log",
            *POOLS,
            *("--tier-dir", str(self._folder / directory)),
            *(bucket if has_bucket else ()),
        )

    def answer(self, number: int) -> tuple[str, dict[str, int]]:
        """The text, and where tokens of the prompt came from."""
        body = {
            "text": PROMPTS[number],
            "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW},
        }
        answer = self.server.request("/generate", body)
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        cached = {tier: details.get(tier) or 0 for tier in ("device", "host", "storage")}
        cached["whole"] = (meta["prompt_tokens"] - 1) // PAGE * PAGE
        return answer["text"], cached


@pytest.fixture(scope="module")
def life(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    life = Life(trained, tmp_path_factory.mktemp("life"))
    yield life
    life.server.kill()


def test_answers_behind_a_document_are_true(life: Life) -> None:
    for number, (question, word) in enumerate(QUESTIONS.items()):
        text, cached = life.answer(number)
        assert cached["storage"] == 0
        assert word in text, question
        life.computed.append(text)


@pytest.mark.parametrize(("number", "tier"), [(5, "device"), (3, "host"), (0, "storage")])
def test_from_each_tier_the_text_is_equal(life: Life, number: int, tier: str) -> None:
    if tier == "storage":
        assert ask(life.server, "/tier/checkpoint", {"text": PROMPTS[0], "tier": "nvme"})[0] == 200
    text, cached = life.answer(number)
    assert text == life.computed[number]
    assert cached[tier] > cached["whole"] / 2, cached


@pytest.mark.parametrize("tier", ["object", "nvme"])
def test_after_a_kill_the_text_is_equal(life: Life, tier: str) -> None:
    """Out of the bucket on an empty disk, and then from that disk without the bucket."""
    assert len(life.computed) == len(PROMPTS)
    for prompt in PROMPTS:
        code, report = ask(life.server, "/tier/checkpoint", {"text": prompt, "tier": tier})
        assert code == 200, report
    life.server.kill()
    is_bucket = tier == "object"
    life.start("another" if is_bucket else life.directory, has_bucket=is_bucket)
    for number, computed in enumerate(life.computed):
        text, cached = life.answer(number)
        assert text == computed
        assert cached["storage"] == cached["whole"], cached
