"""Every alert fires when it should, on a fleet that is well but for one thing, and only then.

``promtool`` judges: it evaluates the rules over series of an hour, of two ranks, that have every
metric of the table from the start.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.promtool import promtool
from sglang_tiered.metrics import BOUNDS_S, METRICS, PREFIX, TRANSFER_METRICS, Metric, MetricKind
from sglang_tiered.route.record import Numbers

ALERTS = Path(__file__).parents[2] / "scripts" / "grafana" / "alerts.yaml"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"].removeprefix("SglangTiered"): rule
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
OF_TARGET = {"job": "sglang-tiered", "instance": "a:30000"}
OF_SERVER = OF_TARGET | {"model_name": "m", "engine_type": "prefill"}
# Which are up, and no more.
OF_DECODE = {"instance": "b:30000", "engine_type": "decode"}
OF_OTHERS = (OF_DECODE, {"instance": "c:30000"})
NAMED = set(re.findall(rf"{PREFIX}\w+", ALERTS.read_text(encoding="utf-8")))
OF_FRONT = {"job": "router", "instance": "r:30002"}
# What a server that is well keeps at 0, by a label's value and by name.
AT_ZERO_KEYS = re.compile(r"corrupt|damaged|io_error|no_space|dropped_\w+|lost_\w+|gave_up|failed")
AT_ZERO = {
    *("nvme_stuck_regions", "object_refused", "demotion_dropped_pages", "demotion_gone_pages"),
    *("peer_servers_withheld", "peer_breaches", "transfer_refused_messages"),
    *("transfer_damaged_slabs", "request_log_dropped"),
}
RISES, RISES_FAST, STANDS = "0+60x60", "0+600x60", "1x60"

NVME_LOAD = {"tier": "nvme", "operation": "load"}

Labels = dict[str, str]
Series = dict[tuple[str, frozenset[tuple[str, str]]], str]
# A metric's exported name without prefix, labels of the series that are changed, and their values.
Change = tuple[str, Labels, str]

CASES: dict[str, list[Change]] = {
    "ServerDown": [("up", OF_TARGET, "1x20 0x40"), ("build_info", OF_TARGET, "1x20 stale")],
    "NoServer": [("build_info", {}, "_x60"), ("up", {}, "_x60")],
    "RoleMissing": [("build_info", OF_DECODE, "1x20 stale")],
    "FrontDown": [("up", OF_FRONT, "1x30 0x30")],
    "NoServerReady": [("route_servers", {"state": "ready"}, "1x30 0x30")],
    "TierSick": [("tier_healthy", {"tier": "nvme", "tp_rank": "1"}, "1x30 0x30")],
    "PagesDamaged": [("page_outcomes_total", {"tier": "nvme", "reason": "corrupt"}, "0x50 1x10")],
    "DiskErrors": [("page_outcomes_total", NVME_LOAD | {"reason": "io_error"}, "0x50 1x10")],
    "DiskFull": [("page_outcomes_total", {"reason": "no_space", "tier": "nvme"}, RISES)],
    "DiskTooSlow": [("admission_pages_total", {"outcome": "dropped_backlog"}, RISES)],
    "HostPagesLost": [("host_left_pages_total", {"outcome": "lost_waiting"}, RISES)],
    "WriteBudgetUsedUp": [("admission_pages_total", {"outcome": "dropped_budget"}, RISES)],
    "RegionStuck": [("nvme_stuck_regions", {"tp_rank": "1"}, "0x30 1x30")],
    # 14 of the 60 that begin: what is given up counts as begun too, so the sum of both is no whole.
    "LoadsLate": [("load_decision_tokens_total", {"decision": "gave_up"}, "0+14x60")],
    "QueueLong": [
        ("request_wait_seconds_bucket", {"le": str(bound)}, "0x60")
        for bound in BOUNDS_S
        if bound < 30
    ],
    "PeersNotFound": [("peer_discovery_works", {"tp_rank": "0"}, "1x30 0x30")],
    "PeersWithheld": [("peer_servers_withheld", {"tp_rank": "0"}, "0x20 1x40")],
    "BucketRefuses": [("object_refused", {"kind": "delete"}, "0x30 1x30")],
    "BucketTooSlow": [("demotion_gone_pages_total", {}, RISES)],
    "HandoffsFailing": [("transfer_rooms_ended_total", {"outcome": "failed"}, RISES)],
    "SlabsDamaged": [("transfer_damaged_slabs_total", {}, "0x50 1x10")],
    "Breaches": [("peer_breaches_total", {}, "0x50 1x10")],
    "RequestLogDrops": [("request_log_dropped_total", {}, "0x50 1x10")],
}
NEARLY: dict[str, list[Change]] = {
    "a tier has been sick for two minutes": [("tier_healthy", {"tier": "nvme"}, "1x57 0x3")],
    "tiers were detached ten minutes ago, and nobody asks who else there is": [
        ("peer_discovery_works", {}, "1x49 0x11"),
        ("tier_capacity_bytes", {"tier": "nvme"}, "1x49 0x11"),
    ],
    "a page in fifty is dropped": [
        ("admission_pages_total", {"outcome": "dropped_backlog"}, "0+1x60")
    ],
    "a sixth of what begins to load is late": [
        ("load_decision_tokens_total", {"decision": "gave_up"}, "0+10x60")
    ],
    "every tier is full": [
        (name, {}, values)
        for name, values in (("tier_held_bytes", "5x60"), ("evicted_pages_total", RISES_FAST))
    ],
}


def series_of(metric: Metric) -> Series:
    """What one rank that is well exports of a metric."""
    found: Series = {}
    for source in metric.sources:
        for keys in source.known or (("any",) * (len(metric.labels) - len(source.labels)),):
            values = (*source.labels, *keys)
            labels = dict(zip(metric.labels, values, strict=True))
            is_zero = metric.name in AT_ZERO or any(AT_ZERO_KEYS.fullmatch(key) for key in values)
            if metric.kind is MetricKind.HISTOGRAM:
                for bound in (*map(str, BOUNDS_S), "+Inf"):
                    key = frozenset({**labels, "le": bound}.items())
                    found[metric.name + "_bucket", key] = RISES
                continue
            counts = metric.kind is MetricKind.COUNTER
            name = metric.name + ("_total" if counts else "")
            found[name, frozenset(labels.items())] = (
                "0x60" if is_zero else RISES if counts else STANDS
            )
    return found


def fleet(changes: list[Change]) -> Series:
    """Two ranks of a server that are well, their target, and another server, but for some
    changes: all series that the rules name, and those of ``changes``."""
    well: Series = {("up", frozenset(one.items())): STANDS for one in (OF_TARGET, OF_FRONT)}
    for state in ("ready", "other"):
        well["route_servers", frozenset((OF_FRONT | {"state": state}).items())] = STANDS
    for other in OF_OTHERS:
        well["up", frozenset((OF_TARGET | {"instance": other["instance"]}).items())] = STANDS
        well["build_info", frozenset((OF_SERVER | other).items())] = STANDS
    for metric in (*METRICS, *TRANSFER_METRICS):
        for (name, labels), values in series_of(metric).items():
            for rank in ("0", "1"):
                of_rank = OF_SERVER | {"tp_rank": rank, "pp_rank": "0"}
                well[name, labels | frozenset(of_rank.items())] = values
    for name, some, values in changes:
        changed = [
            key for key in well if key[0] == name and frozenset(some.items()).issubset(key[1])
        ]
        assert changed, (name, some)
        well.update(dict.fromkeys(changed, values))
    named = {"up", *(name.removeprefix(PREFIX) for name in NAMED), *(one[0] for one in changes)}
    return {key: values for key, values in well.items() if key[0] in named}


def case(changes: list[Change], *firing: str) -> dict[str, Any]:
    """All alerts that fire, each once: ranks are taken together."""
    series = []
    for (name, labels), values in fleet(changes).items():
        chosen = ",".join(f'{label}="{value}"' for label, value in sorted(labels))
        exported = name if name == "up" else PREFIX + name
        series.append({"series": f"{exported}{{{chosen}}}", "values": values})
    samples = [{"labels": f'{{alertname="SglangTiered{name}"}}', "value": 1} for name in firing]
    asked = 'count by (alertname) (ALERTS{alertstate="firing"})'
    expected = {"expr": asked, "eval_time": "1h", "exp_samples": samples}
    return {"interval": "1m", "input_series": series, "promql_expr_test": [expected]}


def judge(folder: Path, *cases: dict[str, Any]) -> None:
    path = folder / "cases.yaml"
    document = {"rule_files": [str(ALERTS)], "evaluation_interval": "2m", "tests": list(cases)}
    path.write_text(json.dumps(document))  # which is YAML, and quicker
    promtool("test", "rules", path)


def test_alerts_fire_alone_for_their_cause(tmp_path: Path) -> None:
    """Nor for what is nearly one; and a server that never came up has nothing but ``up``."""
    assert CASES.keys() == RULES.keys()
    never: list[Change] = [("up", OF_TARGET, "0x60"), ("build_info", OF_TARGET, "_x60")]
    silent = [case([]), *map(case, NEARLY.values())]
    judge(
        tmp_path, *silent, *(case(CASES[name], name) for name in RULES), case(never, "ServerDown")
    )
    with pytest.raises(AssertionError, match="SglangTieredTierSick"):
        judge(tmp_path, case([], "TierSick"))


def test_the_first_failure_is_seen_only_from_zero(tmp_path: Path) -> None:
    """Why every reason has a series from the start."""
    first: Change = ("page_outcomes_total", {"tier": "nvme", "reason": "corrupt"}, "_x50 1x10")
    judge(tmp_path, case([first]), case(CASES["PagesDamaged"], "PagesDamaged"))


def test_rules_know_only_metrics_of_the_table() -> None:
    """Those of other cases are series that promtool would take for absent."""
    assert {f"{PREFIX}{name}" for name, _ in fleet([])} >= NAMED
    assert f"{PREFIX}route_servers" in {one.name for one in Numbers().registry.collect()}
    assert len(NAMED) > 10
