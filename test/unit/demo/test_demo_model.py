"""The demo model: same bytes from the same seed, and text that shows a wrong cache page."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kit.commands import ran

MAKER = Path(__file__).resolve().parents[3] / "scripts" / "make_demo_model.py"

# In a process of its own: importing transformers beside a CPU torch needs two of torchvision's
# operators declared first, and must leave no trace in the test process.
GENERATE = """
import json, sys
import torch
library = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    try:
        library.define(operator + "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    except RuntimeError:
        pass  # torchvision's own are there
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
chat = [{"role": "user", "content": "What is a prefix?"}]
answers = {
    "chat": tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False),
    "dtype": str(model.dtype),
}
for prompt in json.loads(sys.argv[2]):
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(
        **inputs,
        max_new_tokens=48,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.scores).topk(2).values
    answers[prompt] = {
        "tokens": output.sequences[0, inputs["input_ids"].shape[1] :].tolist(),
        "gaps": (best[:, 0] - best[:, 1]).tolist(),
    }
print(json.dumps(answers))
"""


def make(out_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, str(MAKER), str(out_dir), *arguments)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("with space") / "model"
    result = make(out_dir)
    assert result.returncode == 0, result.stderr
    return out_dir


def test_existing_other_folder_is_refused_and_untouched(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    result = make(tmp_path / "mine")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes"]

    before = (model_dir / "model.safetensors").stat()
    assert make(model_dir).returncode == 0
    for other in (("--seed", "7"), ("--shape", "24m")):
        assert "is not this model" in make(model_dir, *other).stderr
    assert (model_dir / "model.safetensors").stat() == before


def test_demo_model_never_changes_its_bytes(model_dir: Path) -> None:
    digest = hashlib.sha256((model_dir / "model.safetensors").read_bytes()).hexdigest()
    assert digest.startswith("480d0ec523d0b976")


def test_greedy_text_depends_on_the_whole_prompt(model_dir: Path) -> None:
    long = "The quick brown fox jumps over the lazy dog. " * 10
    prompts = ["Hello", "What is a prefix?", long, "J" + long[1:]]
    result = ran(sys.executable, "-c", GENERATE, str(model_dir), json.dumps(prompts), timeout_s=120)
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout)

    assert answers.pop("dtype") == "torch.float32"
    assert answers.pop("chat") == "<|begin|><|user|>What is a prefix?<|end|><|assistant|>"
    texts = [bytes(answers[prompt]["tokens"]) for prompt in prompts]
    assert len(set(texts)) == len(prompts), "a continuation ignores its prompt"
    assert all(len(text) == 48 for text in texts), "generation ended early"
    assert all(0x20 <= byte < 0x7F for text in texts for byte in text)
    assert all(len(set(text)) >= 8 for text in texts), "a continuation fell into a loop"
    gaps = [gap for prompt in prompts for gap in answers[prompt]["gaps"]]
    assert sum(gap > 1e-3 for gap in gaps) >= 0.98 * len(gaps)
