"""The planner: few simulations, nearly the best split; and the command around it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kit.commands import cli_of
from kit.talks import talk_lines
from sglang_tiered_lab.cluster.cli import main
from sglang_tiered_lab.cluster.planner import Fleet, Planner, largest_speed
from sglang_tiered_lab.cluster.published_settings import distserve
from sglang_tiered_lab.trace.cluster.plan import Plan
from sglang_tiered_lab.trace.cluster.profiles import load_profiles
from sglang_tiered_lab.trace.replay.server import Request

H100, A100 = (load_profiles().kind(name, "llama-3.1-8b") for name in ("h100", "a100"))


def talks(count: int) -> list[Request]:
    made = []
    for number in range(count):
        units = [number // 3 * 100 + position for position in range(8 + 4 * (number % 3))]
        made.append(Request(0.1 * number, 512 * len(units), 120, units, number % 3 > 0))
    return made


def plan(fleet: Fleet, **more: float) -> Plan:
    return Plan(
        members=fleet.members(None),
        policy="cost",
        unit_tokens=512,
        ttft_s=1.0,
        tpot_s=0.03,
        **more,  # type: ignore[arg-type]
    )


def test_the_planner_is_near_the_best_of_all() -> None:
    fleet = Fleet(((H100, 8), (A100, 8)))
    planner = Planner(plan(fleet, speed=15.0), talks(240), fleet)
    best = planner.search()
    assert len(planner.outcomes) <= 0.1 * len(planner.candidates)
    found = planner.outcomes[best].goodput
    assert 0.2 < found < 1.0
    top = planner.outcomes[planner.search_all()].goodput
    assert len(planner.outcomes) == len(planner.candidates)
    assert found >= 0.95 * top


def test_largest_speed_is_where_the_goal_is_met() -> None:
    fleet = Fleet(((H100, 2),))
    requests = talks(120)
    speed = largest_speed(plan(fleet), requests, 0.9)
    planner = Planner(plan(fleet, speed=speed), requests, fleet)
    assert planner.simulate(None).goodput >= 0.9
    faster = dataclasses.replace(planner.plan, speed=1.3 * speed)
    assert Planner(faster, requests, fleet).simulate(None).goodput < 0.9


def test_disaggregation_wins_where_its_authors_say() -> None:
    rates = {row.what: row.modelled for row in distserve(120)}
    both, parted = rates["one GPU that does both"], rates["2 that prefill and 1 that decodes"]
    assert parted > 1.3 * both
    assert rates["one GPU that only prefills"] < rates["one GPU that only decodes"]


LINES = talk_lines(150, 30)


def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, file = tmp_path / "talks.jsonl", tmp_path / "plan.json"
    trace.write_text(LINES)
    words = ["--fleet", "2:h100", "--fleet", "1:h100,2:a100", "--price", "a100=1.5"]
    words += ["--ttft", "500ms", "--tpot", "20ms", "--exhaustive", "--json", str(file)]
    assert main(["plan", str(trace), *words]) == 0
    shown = capsys.readouterr().out
    for word in ("1P:1D h100", "$7.76 an hour", "without peers", "for 90%:", "$ per good Mtok"):
        assert word in shown, word
    plans = json.loads(file.read_text())["plans"]
    assert [one["fleet"] for one in plans] == ["2 h100", "1 h100 2 a100"]
    assert all(one["goodput_over_exhaustive"] >= 0.95 for one in plans)
    assert {row["tiers"] for row in plans[0]["tiers"]} >= {"all", "device only"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("/no/such.jsonl",), "cannot be read"),
        (("--price", "h1000=4"), "--price h1000: no --fleet has such servers"),
        (("--model", "llama-3.1-70b"), "too little for llama-3.1-70b"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    tmp_path: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "talks.jsonl"
    trace.write_text(LINES)
    place = () if words[0].endswith(".jsonl") else (trace,)
    assert sentence in cli_of(main, capsys)("plan", *place, *words).refusal
