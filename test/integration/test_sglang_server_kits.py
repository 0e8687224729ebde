"""SGLang's own tests of servers (``sglang.test.kits``): what passes on stock passes with tiers.

Each runs on a server with device memory, host memory and NVMe. Those that the demo model fails on
stock are ``LEFT_OUT``. Kits that do not run here need a data set or a model of the network
(``eval_accuracy``, ``lm_eval``, ``mmmu_vlm``, ``vlm_perf``, ``perf_bench``, ``kl_divergence``, each
``test_gsm8k``, and what asks a trained model), a draft model (``spec_decoding``, most of
``spec_server_kits``), a GPU (``fwd_occupancy``, ``dsa_metadata``, ``attention_unittest``), Mamba
states (``prefix_cache_branching``), or SGLang's router and RDMA (``pd_parity``).
"""

from __future__ import annotations

import json
import random
import unittest
import warnings
from pathlib import Path
from typing import Any

import pytest

from conftest import ALWAYS, Launch, make_prompts
from server_process import Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about kernels a CPU does not have
    import sglang.srt.server_args  # noqa: F401 - its import warns too
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer
    from sglang.test.kits import radix_cache_server_kit, unified_radix_cache_kit
    from sglang.test.kits.abort_timeout_kit import AbortAllMixin
    from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
    from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
    from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
    from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
    from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
    from sglang.test.kits.spec_server_kits import SpecLogprobKit
    from sglang.test.kits.streaming_session_kit import StreamingSessionKitMixin
    from sglang.test.server_fixtures import streaming_session_fixture


pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


class Tokens(random.Random):
    """The kits take tokens from a vocabulary of 32,000; those of the demo model are bytes."""

    Random: Any

    def randint(self, first: int, last: int) -> int:
        return super().randint(first, last if last < 30_000 else 255)


Tokens.Random = Tokens


class Kit(
    AbortAllMixin,
    BasicAPIContractMixin,
    BasicDecodeCorrectnessMixin,
    BasicSchedulerStressMixin,
    PauseResumeInPlaceMixin,
    SpecLogprobKit,
    StreamingSessionKitMixin,
    unified_radix_cache_kit.UnifiedRadixTreeTestMixin,
    unified_radix_cache_kit.AccuracyTwoPassMixin,
    unittest.TestCase,
):
    """The kits' tests, in sizes that a CPU computes in seconds."""

    __test__ = False
    abort_all_num_requests = 4
    abort_all_sleep = 1.0
    pause_num_requests = 4
    pause_max_new_tokens = 512
    pause_duration = 0.5
    max_new_tokens = 16
    num_groups = 2
    branches_per_group = 2
    kl_threshold = 1e-4
    logprob_match_delta = 1e-2
    input_ids = make_prompts(4100, 4, 512)

    def __init__(self, server: Server, model: Path, test: str) -> None:
        super().__init__(test)
        self.base_url = server.url
        self.process = server.process
        self.model = str(model)
        self.tokenizer = get_tokenizer(str(model))

    def test_radix_attention(self) -> None:
        radix_cache_server_kit.run_radix_attention_test(self.base_url)

    def run_kit(self) -> str | None:
        """What went wrong, if anything did."""
        result = unittest.TestResult()
        self(result)
        assert result.testsRun == 1 and not result.skipped
        return next((told for _, told in (*result.failures, *result.errors)), None)


ANSWERS = """
test_capital_france test_basic_math test_color_completion test_streaming_response
test_concurrent_requests
"""  # of a trained model
LONG = "test_first_mid_abort_recovery test_nth_mid_abort_recovery test_long_prompt"
OTHER_MODELS = """
test_gsm8k test_gsm8k_two_passes test_logprob_match test_logprob_mixed
test_logprob_decode_match_prefill
"""  # data sets of the network, or tokens of a larger vocabulary
LEFT_OUT = {*ANSWERS.split(), *LONG.split(), *OTHER_MODELS.split()}
SIZES = {
    "CONCURRENT_LOGPROB_ROUNDS": 1,
    "CONCURRENT_LOGPROB_TURNS": 3,
    "STRESS_NUM_SESSIONS": 3,
    "STRESS_NUM_TURNS": 2,
}
TESTS = sorted(name for name in dir(Kit) if name.startswith("test_") and name not in LEFT_OUT)


@pytest.fixture(scope="module")
def server(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """With as much device memory as stock has: SGLang never evicts the pages of open sessions."""
    directory = tmp_path_factory.mktemp("tier") / "kv"
    sizes = ("--max-total-tokens", "16384", "--tier-host-bytes", "64MiB")
    return launch(*(*sizes, *ALWAYS, "--tier-dir", str(directory), "--enable-streaming-session"))


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    for kit in (radix_cache_server_kit, unified_radix_cache_kit):
        monkeypatch.setattr(kit, "random", Tokens(7))
    nodes = radix_cache_server_kit.gen_radix_tree
    monkeypatch.setattr(
        radix_cache_server_kit, "gen_radix_tree", lambda: nodes(num_nodes=24, chunk_len=48)
    )
    for name, value in SIZES.items():
        monkeypatch.setattr(streaming_session_fixture, name, value)


@pytest.mark.parametrize("test", TESTS)
def test_kits_that_pass_on_stock_pass_with_tiers(test: str, server: Server, model: Path) -> None:
    went_wrong = Kit(server, model, test).run_kit()
    assert went_wrong is None, went_wrong


def test_every_turn_hits_the_turns_before_it(server: Server, model: Path, tmp_path: Path) -> None:
    source = random.Random(8)
    words = ["".join(chr(source.randrange(97, 123)) for _ in range(300)) for _ in range(12)]
    turns = [{"conversations": [{"value": text}, {"value": text}]} for text in words]
    conversations = tmp_path / "conversations.json"
    conversations.write_text(json.dumps(turns))
    run_multiturn_cache_hit_test(
        server.url,
        str(model),
        num_clients=4,
        request_length=200,
        output_length=8,
        dataset_path=str(conversations),
    )
