"""A hint that cannot be loaded yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache_world import PAGE, cache_world, prompt
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_tiered.integration.cache.ahead.chain_loader import Chain, PieceOutcome

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NUM_PAGES = 4


def test_hint_that_cannot_proceed_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device alone holds what is above its next page, say."""
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        cache = world.cache
        hints, loader = cache.tiering.hints, cache.tiering.hints._loader
        prompts = [prompt(number, NUM_PAGES) for number in range(2)]
        world.store(*prompts)
        begin, is_held_up = loader.begin, True
        chains = []
        for tokens in prompts:
            key = RadixKey(tokens, None)
            chain = Chain(tokens, None, None, get_storage_hash_str(key, None, page_size=PAGE))
            assert hints.begin(chain, 0, len(tokens)) is not None
            chains.append(chain)

        def begin_late(chain: Chain, *given: Any) -> PieceOutcome:
            late = is_held_up and chain == chains[0]
            return loader._ends(PieceOutcome.LATER) if late else begin(chain, *given)

        def has_come(tokens: Any) -> bool:
            match = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:], None)))
            return bool(match.host_hit_length == len(tokens))

        monkeypatch.setattr(loader, "begin", begin_late)
        world.until(lambda: has_come(prompts[1]))
        is_held_up = False
        world.until(lambda: has_come(prompts[0]))
