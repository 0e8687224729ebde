"""``HiddenPages``: the pages that memory may still hold and nobody may find there.

SGLang's tree has no call that removes one path. So a page that was erased is hidden by its hash,
which names all tokens up to its end: matches end before it, and nothing stores it. A request that
computes it again makes it visible again. A request that ran when the page was erased does not:
what it brings is from before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["MAX_HIDDEN_PAGES", "HiddenPages"]

MAX_HIDDEN_PAGES = 131_072
"""Hidden pages beyond which memory is better emptied: about 150 bytes each."""


class HiddenPages:
    """The hashes of hidden pages. Lookups on any thread, without a lock; the rest on the
    scheduler's."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self.version = 0
        """Grows with what is hidden. A request that saw one has seen the pages hidden up to it."""

    def __bool__(self) -> bool:
        return bool(self._since)

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, page_hash: object) -> bool:
        return page_hash in self._since

    @property
    def are_too_many(self) -> bool:
        """Whether memory should be hidden as a whole instead, until it can be emptied."""
        return len(self._since) > MAX_HIDDEN_PAGES

    def hide(self, hashes: Iterable[str]) -> None:
        """Hide pages from now on. A page that is hidden already counts as hidden just now."""
        # The version last: who sees it sees all pages of it.
        self._since.update(dict.fromkeys(hashes, self.version + 1))
        self.version += 1

    def num_visible(self, hashes: Sequence[str]) -> int:
        """Count the leading pages that are not hidden."""
        since = self._since
        if not since:
            return len(hashes)
        return next((at for at, each in enumerate(hashes) if each in since), len(hashes))

    def computed(self, hashes: Iterable[str], seen: int, *, is_behind: bool) -> tuple[bool, bool]:
        """Take note of pages of one chain, in order, that the tree holds by a request which had
        seen version ``seen`` when it began. ``is_behind``: a page before them stays hidden, so
        they are hidden with it. Returns whether any became visible, and ``is_behind`` for what
        follows."""
        has_shown = False
        for each in hashes:
            since = self._since.get(each)
            is_behind = is_behind or (since is not None and since > seen)
            if is_behind:
                self._since.setdefault(each, self.version)
            elif since is not None:
                del self._since[each]
                has_shown = True
        return has_shown, is_behind

    def clear(self) -> None:
        """Hide nothing any more: memory holds none of these pages."""
        self._since = {}
        self.version += 1
