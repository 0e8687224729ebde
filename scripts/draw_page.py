"""Draw the page ``/tier/`` of a server that is up, as an SVG picture of the page's own HTML.

    python scripts/draw_page.py http://localhost:30000 docs/pictures/page.svg

Of that picture the server was ``scripts/serve --tier-log-requests FILE``; ``scripts/demo --url``
asked it, and two conversations, of which one was pinned.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1] / "test"))
from kit.chromium import Browser, chromium  # noqa: E402 - the tests drive the same one

WIDTH = 1000
# What moves or asks is of no use in a picture, nor is a list that goes on.
_STILL = """(() => {
  const going = "script, link, meta, #entry, [hidden], #requests > :nth-child(n+5), "
    + "#conversations > :nth-child(n+3)";
  document.querySelectorAll(going).forEach(each => each.remove());
  const page = new XMLSerializer().serializeToString(document.documentElement);
  return [page, document.body.scrollHeight];
})()"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="of a server without keys")
    parser.add_argument("svg", type=Path, metavar="FILE")
    options = parser.parse_args()
    program, why_not = chromium()
    if program is None:
        print(f"draw_page: {why_not}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as profile, Browser(program, Path(profile)) as browser:
        browser.look(width=WIDTH, is_dark=False)
        browser.go(options.url.rstrip("/") + "/tier/")
        for part in ("#tiers .bar", "#requests > li", "#conversations > li"):
            browser.wait_for(f"!!document.querySelector({part!r})")
        page, height = browser.ask(_STILL)
    size = f'width="{WIDTH}" height="{height}"'
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size}>'
        f"<foreignObject {size}>{page}</foreignObject></svg>\n"
    )
    ElementTree.fromstring(picture)  # whole, or raises
    options.svg.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
