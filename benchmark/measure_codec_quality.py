"""What a lossy page does to a trained model: perplexity of real text, and greedy answers.

The model is the demo's SmolLM2-135M-Instruct in float32, run in Transformers on the CPU. The exact
KV of a prefix goes through a codec and back, cut into the pages of a server's pool; everything
after it is computed on top. The texts are those that this repository ships.

``perplexity`` scores 512 tokens behind a prefix of 1,024, in pieces taken from each file in turn.
``answers`` asks ten questions behind 512 tokens of a document, and compares 16 greedy tokens.
``served`` asks a live server the same: computed, then out of a bucket that kept them with a codec.
A section that --minutes ends early says how much of it was done. A JSON file that is there keeps
the sections that are not run again.

    python benchmark/measure_codec_quality.py [--only SECTION,...] [--minutes N] [--quick]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from measure_codecs import PAGE, ROOT, DynamicCache, Model, through
from server_process import Server
from sglang_tiered.codecs import make_codec
from sglang_tiered.codecs.encoded import copied
from sglang_tiered.demo.server import TRAINED, demo_model
from sglang_tiered.tools.machine import describe_machine, describe_versions
from sglang_tiered.transfer.layout import Pair, slab_codec
from sglang_tiered.transfer.messages import KVLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

EXACT, HANDOFF = "exact", "handoff_int8"
LOSSY = ("int8", "fp8")
NAMES = (EXACT, *LOSSY, HANDOFF)
SLAB_PAGES = 2
"""A handoff encodes the pages of a slab together, 128 tokens where they come in chunks."""
TEXTS = ("LICENSE", "README.md", "docs/*.md")
PREFIX, SCORED = 1024, 512
DOCUMENT, NUM_NEW = 512, 16
OPENING, ASSISTANT = "<|im_start|>user\nRead this text:\n", "<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "How many days does a week have?",
    "Who wrote Romeo and Juliet?",
    "What is the chemical formula of water?",
    "What is this text about?",
    "Name one word that the text explains.",
    "Which numbers does the text give?",
    "Repeat the first sentence of the text.",
    "Summarise the text in one sentence.",
)
SERVED_DOCUMENTS = 1
SECTIONS = ("perplexity", "answers", "served")


class Piece(NamedTuple):
    """Tokens of one file, from one place on to its end."""

    source: str
    tokens: list[int]


class Judge:
    """The model, its tokenizer, and the KV that each codec makes of exact KV."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.model = Model(path, "float32")
        self.end = int(self.model.model.config.eos_token_id)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def pieces(self, length: int, step: int, number: int) -> list[Piece]:
        """So many, of at least ``length`` tokens, ``step`` apart, from each file in turn."""
        of_files = []
        for pattern in TEXTS:
            for path in sorted(ROOT.glob(pattern)):
                tokens = self.tokens(path.read_text(encoding="utf-8"))
                starts = range(0, len(tokens) - length + 1, step)
                name = str(path.relative_to(ROOT))
                of_files.append([Piece(name, tokens[start:]) for start in starts])
        turns = itertools.chain.from_iterable(itertools.zip_longest(*of_files))
        return list(itertools.islice((piece for piece in turns if piece), number))

    def variants(self, prefix: Sequence[int]) -> dict[str, torch.Tensor]:
        """KV of a prefix of whole pages, exact and behind each codec. ``zstd`` must be exact."""
        kv = self.model.prefill(prefix)
        pages = self.model.pages(kv)
        (back, _) = through(make_codec("zstd", self.model.layout), pages)
        if not all(map(np.array_equal, back, pages)):
            raise SystemExit("zstd changed a page: it is not exact.")
        found = {EXACT: kv}
        for name in LOSSY:
            back, _ = through(make_codec(name, self.model.layout), pages)
            found[name] = self.model.from_pages(back, kv)
        return {**found, HANDOFF: _through_handoff(kv)}


def _through_handoff(kv: torch.Tensor) -> torch.Tensor:
    """KV as decode gets it from prefill with ``--transfer-codec int8``."""
    sides, layers, _, heads, dim = kv.shape
    buffers = sides * layers
    page_bytes = PAGE * heads * dim * kv.element_size()
    layout = KVLayout(
        page_size=PAGE,
        dtype="float32",
        page_bytes=[page_bytes] * buffers,
        layer_ids=list(range(layers)) * sides,
        tp_rank=0,
        tp_size=1,
        total_heads=heads,
        states=[],
        aux_bytes=[1],
        element="float32",
        codec="int8",
    )
    pairs = [Pair(index, index, page_bytes) for index in range(buffers)]
    parts = []
    for slab in kv.split(SLAB_PAGES * PAGE, dim=2):
        num_pages = slab.shape[2] // PAGE
        plain = slab.contiguous().view(torch.uint8).numpy().reshape(-1)
        codec: Any = slab_codec(layout, pairs, num_pages)
        encoded, back = copied(codec.encode((plain.data,))), np.empty_like(plain)
        codec.decode(encoded.data, (back.data,))
        parts.append(torch.from_numpy(back).view(kv.dtype).reshape(slab.shape))
    return torch.cat(parts, dim=2)


def _cache(kvs: Sequence[torch.Tensor]) -> DynamicCache:
    """One row for each KV."""
    cache = DynamicCache()
    for layer in range(kvs[0].shape[1]):
        cache.update(
            *(torch.stack([kv[side, layer].transpose(0, 1) for kv in kvs]) for side in (0, 1)),
            layer,
        )
    return cache


def score(judge: Judge, piece: Piece) -> dict[str, Any]:
    """Of a piece: the sum of -log p of its scored tokens behind each KV, and how many of the best
    tokens are those behind exact KV."""
    fed = piece.tokens[PREFIX : PREFIX + SCORED]
    right = torch.tensor(piece.tokens[PREFIX + 1 : PREFIX + SCORED + 1])
    found: dict[str, Any] = {"source": piece.source, "nll": {}, "same_best": {}}
    best = torch.empty(0)
    for name, kv in judge.variants(piece.tokens[:PREFIX]).items():
        out = judge.model.model(torch.tensor([fed]), past_key_values=_cache([kv]), use_cache=True)
        logits = out.logits[0]
        if name == EXACT:
            best = logits.argmax(-1)
        chosen = logits.gather(1, right[:, None])[:, 0].double()
        found["nll"][name] = float((logits.logsumexp(-1).double() - chosen).sum())
        found["same_best"][name] = int((logits.argmax(-1) == best).sum())
    return found


def document_prompts(judge: Judge, piece: Piece) -> tuple[list[int], list[list[int]]]:
    """Whole pages of a chat that begins with a document, and how each question ends it."""
    opening = judge.tokens(OPENING)
    prefix = opening + piece.tokens[: DOCUMENT - len(opening)]
    return prefix, [judge.tokens(f"\n\n{question}{ASSISTANT}") for question in QUESTIONS]


def answer(judge: Judge, piece: Piece) -> dict[str, list[list[int]]]:
    """Greedy answers behind each KV, one for each question, cut where the model ends them.

    All questions are one sequence, in which each sees the document and itself."""
    prefix, questions = document_prompts(judge, piece)
    variants = judge.variants(prefix)
    lengths = torch.tensor(list(map(len, questions)))
    each = torch.arange(len(questions))
    owner = torch.cat([torch.full((len(prefix),), -1), each.repeat_interleave(lengths)])
    step = torch.tensor(list(itertools.chain(*questions))).expand(len(variants), -1)
    places = len(prefix) + torch.cat([torch.arange(length) for length in lengths])
    ends = lengths.cumsum(0) - 1
    cache = _cache(list(variants.values()))
    chosen = []
    for _ in range(NUM_NEW):
        at = torch.arange(len(owner))
        new = slice(len(owner) - step.shape[1], None)
        sees = (owner[None] == -1) | (owner[None] == owner[new, None])
        sees &= at[None] <= at[new, None]
        out = judge.model.model(
            step,
            attention_mask=sees.expand(len(variants), 1, -1, -1),
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=ends,
        )
        step = out.logits.argmax(-1)  # [variants, questions]
        chosen.append(step)
        owner, places, ends = torch.cat([owner, each]), places[ends] + 1, each
    rows = torch.stack(chosen, dim=2).tolist()
    return {
        name: [_until(tokens, judge.end) for tokens in row]
        for name, row in zip(variants, rows, strict=True)
    }


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def measure_perplexity(pieces: Iterator[Piece], judge: Judge) -> dict[str, Any]:
    return {"pieces": [score(judge, piece) for piece in pieces]}


def measure_answers(pieces: Iterator[Piece], judge: Judge) -> dict[str, Any]:
    documents = []
    for piece in pieces:
        answers = answer(judge, piece)
        exact = answers[EXACT]
        other = [
            {"codec": name, "question": question, EXACT: judge.text(right), "text": judge.text(got)}
            for name in NAMES[1:]
            for question, right, got in zip(QUESTIONS, exact, answers[name], strict=True)
            if got != right
        ]
        firsts = {
            name: sum(a[0] == b[0] for a, b in zip(exact, answers[name], strict=True))
            for name in NAMES[1:]
        }
        documents.append({"source": piece.source, "same_first": firsts, "other": other})
    return {"documents": documents}


def measure_served(pieces: Iterator[Piece], judge: Judge) -> dict[str, Any]:
    """Answers of a live server, computed and behind each codec of a bucket, beside our own."""
    asked = [(document_prompts(judge, piece), answer(judge, piece)) for piece in pieces]
    found: dict[str, Any] = {"num_answers": len(asked) * len(QUESTIONS)}
    with tempfile.TemporaryDirectory() as scratch:
        for name in LOSSY:
            folder = Path(scratch) / name
            folder.mkdir()
            computed = _serve(judge, folder, name, asked, "computed")
            resumed = _serve(judge, folder, name, asked, "resumed")
            rows = [
                (a, b, own[EXACT][number], own[name][number])
                for document, (_, own) in enumerate(asked)
                for number in range(len(QUESTIONS))
                for a, b in [(computed[document][number], resumed[document][number])]
            ]
            found[name] = {
                "equal_to_computed": sum(b == a for a, b, _, _ in rows),
                "computed_as_measured": sum(a == own for a, _, own, _ in rows),
                "resumed_as_measured": sum(b == own for _, b, _, own in rows),
            }
    return found


def _serve(
    judge: Judge, folder: Path, codec: str, asked: Sequence[Any], life: str
) -> list[list[list[int]]]:
    """Answers of one server's life. The first brings the documents into the bucket, the second
    must have their pages from there."""
    server = Server.start(
        judge.path,
        folder / f"{life}.log",
        *("--max-total-tokens", "4096", "--tier-host-bytes", "384MiB", "--tier-load", "always"),
        *("--tier-dir", str(folder / life), "--tier-object-url", str(folder / "bucket")),
        *("--tier-codec", codec),
    )
    with server:
        answers = []
        for (prefix, questions), _ in asked:
            answers.append([])
            for number, question in enumerate(questions):
                given = server.generate(prefix + question, NUM_NEW)
                stored = given.cached["storage"]
                if number == 0 and stored != (len(prefix) if life == "resumed" else 0):
                    raise SystemExit(f"{stored} tokens came from the bucket when {life}.")
                answers[-1].append(_until(given.output_ids, judge.end))
            if life == "computed":
                body = {"input_ids": prefix, "tier": "object"}
                report = server.request("/tier/checkpoint", body)
                if report["num_missing"]:
                    raise SystemExit(f"the bucket misses pages: {report}")
    return answers


def _figure(values: Sequence[float], value: float) -> dict[str, float]:
    return {"value": value, "min": min(values), "max": max(values), "n": len(values)}


def figures(raw: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of a perplexity the extremes are of pieces. Counts are of ``n`` answers."""
    found = {}
    if pieces := raw.get("perplexity", {}).get("pieces"):
        for name in NAMES:
            each = [piece["nll"][name] / SCORED for piece in pieces]
            exact = [piece["nll"][EXACT] / SCORED for piece in pieces]
            mean, base = (sum(values) / len(values) for values in (each, exact))
            found[f"perplexity_{name}"] = _figure([math.exp(x) for x in each], math.exp(mean))
            if name != EXACT:
                ratios = [math.exp(a - b) for a, b in zip(each, exact, strict=True)]
                same = [piece["same_best"][name] / SCORED for piece in pieces]
                found[f"perplexity_{name}_over_exact"] = _figure(ratios, math.exp(mean - base))
                found[f"same_best_token_{name}"] = _figure(same, sum(same) / len(same))
    if documents := raw.get("answers", {}).get("documents"):
        number = len(documents) * len(QUESTIONS)
        for name in NAMES[1:]:
            others = sum(row["codec"] == name for each in documents for row in each["other"])
            firsts = sum(each["same_first"][name] for each in documents)
            found[f"equal_answers_{name}"] = _count(number - others, number)
            found[f"equal_first_tokens_{name}"] = _count(firsts, number)
    if served := raw.get("served"):
        for name in LOSSY:
            for key, count in served[name].items():
                found[f"served_{key}_{name}"] = _count(count, served["num_answers"])
    return found


def _count(value: int, number: int) -> dict[str, float]:
    return {"value": value, "min": value, "max": value, "n": number}


def _until_late(pieces: Sequence[Piece], minutes: float, said: str) -> Iterator[Piece]:
    """Those that are begun in time."""
    begun = time.monotonic()
    for number, piece in enumerate(pieces):
        seconds = time.monotonic() - begun
        if number and seconds >= 60 * minutes:
            return
        print(f"{said}: {number} of {len(pieces)}, {seconds:.0f} s", file=sys.stderr, flush=True)
        yield piece


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of each section")
    parser.add_argument("--quick", action="store_true", help="two pieces and two documents")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--only names {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    name, folder = demo_model(TRAINED)
    if name != TRAINED:
        raise SystemExit("the trained model cannot be had, and the random one says nothing here.")
    judge = Judge(folder)
    number = 2 if options.quick else 40
    scored = judge.pieces(PREFIX + SCORED + 1, SCORED, number)
    documents = judge.pieces(DOCUMENT, DOCUMENT, number // 2 if number > 2 else 2)
    measures: dict[str, tuple[Callable[..., dict[str, Any]], list[Piece]]] = {
        "perplexity": (measure_perplexity, scored),
        "answers": (measure_answers, documents),
        "served": (measure_served, documents[:SERVED_DOCUMENTS]),
    }
    raw: dict[str, Any] = {}
    with torch.inference_mode():
        for section in wanted:
            measure, pieces = measures[section]
            raw[section] = measure(_until_late(pieces, options.minutes, section), judge)
            digest = hashlib.sha256(repr(pieces).encode()).hexdigest()[:16]
            raw[section]["texts_sha256"] = digest
    if options.json is not None and options.json.exists():
        raw = {**json.loads(options.json.read_text(encoding="utf-8"))["raw"], **raw}
    ratios = figures(raw)
    table = Table("figure", "value", "min", "max", "n")
    for name, figure in ratios.items():
        table.add_row(name, *(f"{figure[key]:.6g}" for key in ("value", "min", "max", "n")))
    Console(width=100).print(table)
    if options.json is not None:
        settings = {
            "model": "SmolLM2-135M-Instruct, its Q4_1 weights unpacked to float32",
            "texts": TEXTS,
            "page_size": PAGE,
            "slab_tokens": SLAB_PAGES * PAGE,
            "prefix_tokens": PREFIX,
            "scored_tokens": SCORED * len(raw.get("perplexity", {}).get("pieces", ())),
            "document_tokens": DOCUMENT,
            "new_tokens": NUM_NEW,
            "questions": QUESTIONS,
        }
        document = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": settings,
            "ratios": ratios,
            "raw": raw,
        }
        text = json.dumps(document, indent=2, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
