"""Model families with other KV are handed over as one server computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import write_latent_attention, write_sliding_window
from instances import COMMON, hands_over_what_one_server_computes

from prefill_decode import ENVIRONMENT, PrefillDecode
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

FAMILIES = {
    "sliding_window_pools": write_sliding_window,
    "latent_attention": write_latent_attention,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_one_server(name: str, model: Path, tmp_path: Path) -> None:
    path = FAMILIES[name](model, tmp_path / "model")
    single = Server.spawn(path, tmp_path / "single.log", *COMMON, environment=ENVIRONMENT)
    pair = PrefillDecode.spawn(path, tmp_path, *COMMON, "--page-size", "64")
    try:
        pair.wait_until_ready()
        single.wait_until_it_generates()
        hands_over_what_one_server_computes(pair, single, 0)
    finally:
        pair.kill()
        single.kill()
