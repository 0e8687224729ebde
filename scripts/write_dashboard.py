"""Write the Grafana dashboard from the panels of this table.

    python scripts/write_dashboard.py [--check]

``--check`` writes nothing and exits with 1 where the file says something else. A metric in an
expression is ``tiered:NAME{MORE}`` or ``sglang:NAME{MORE}``; the dashboard's variables are added as
selectors, and ``[]`` becomes the interval of a rate.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.metrics import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER = Path(__file__).resolve().parent / "grafana"
HEIGHT, MAX_LINE = 8, 110
OF_SERVER = ("model_name", "$model"), ("instance", "$instance")
OF_RANK = (*OF_SERVER, ("dp_rank", "$replica"), ("tp_rank", "$rank"))
_METRIC = re.compile(r"\b(tiered|sglang):(\w+)(?:\{(.*?)\})?")
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One graph. ``lines`` are expressions with their legends, and a unit where that of a line is
    not the panel's: it then has the axis on the right. ``text`` says how to read it."""

    title: str
    text: str
    lines: tuple[tuple[str, ...], ...]
    unit: str = "short"
    width: int = 8
    is_stacked: bool = False


def _quantiles(metric: str, name: str = "", *, by: str = "") -> tuple[tuple[str, str], ...]:
    labels, legend = (f"{by}, le", f" {{{{{by}}}}}") if by else ("le", f" {name}" if name else "")
    return tuple(
        (
            f"histogram_quantile({quantile}, sum by ({labels}) (rate(tiered:{metric}_bucket[])))",
            f"p{quantile * 100:.0f}{legend}",
        )
        for quantile in (0.5, 0.99)
    )


# Tokens and requests of a replica are those of each of its ranks: counted once.
def _once(inner: str, by: str = "") -> str:
    return f"sum{by} (max without (tp_rank, pp_rank) ({inner}))"


# Every server of a bucket tells what the whole of it holds: it is counted once a model, ranks by their
# parts. So are pages of other servers, which each of them knows.
def _shared_once(metric: str, own: str = "", shared: str = "object", parts: str = "") -> str:
    own = own or f'sum by (tier) (tiered:{metric}{{tier!="object"}})'
    parts = parts or "tier, model_name, tp_rank, pp_rank"
    return f'{own} or sum by (tier) (max by ({parts}) (tiered:{metric}{{tier=~"{shared}"}}))'


def _tokens(metric: str) -> str:
    own = _once(f'tiered:{metric}{{tier!="object"}}', " by (tier)")
    return _shared_once(metric, own, parts="tier, model_name")


# fmt: off
ROWS: dict[str, tuple[Panel, ...]] = {
    "What do users see?": (
        Panel("Prompt tokens by where they came from", "The hit rate per tier; what is labelled `computed` cost a prefill. With prefill and decode apart, that of prefill: decode counts each prompt a second time.", (
            ('sum by (cache_source) (rate(sglang:cached_tokens_total{engine_type!="decode"}[]))', "{{cache_source}}"),
            ('sum (rate(sglang:prompt_tokens_total{engine_type!="decode"}[])) - (sum (rate(sglang:cached_tokens_total{engine_type!="decode"}[])) or vector(0))', "computed"),
        ), is_stacked=True),
        Panel("Time to first token", "What the tiers are for. A p99 far above p90 is usually a queue, not the disk.", tuple(
            (f"histogram_quantile({part}, sum by (le) (rate(sglang:time_to_first_token_seconds_bucket[])))", f"p{part * 100:.0f}") for part in (0.5, 0.9, 0.99)
        ), "s"),
        Panel("Wait before admission", "From arrival to admission, and what of it was spent on a load. A load wait near the whole means a slow tier; far below it, a full device pool or a busy processor.", (
            *_quantiles("request_wait_seconds", "request"), *_quantiles("load_wait_seconds", "load"),
        ), "s"),
        Panel("Load or compute", "Tokens that host memory did not hold. `absent`: no tier does (raise the cap, look at Admission). `declined`: the tier was expected to be slower than the processor. `gave_up`: what of `load` became late and was computed after all; a steady rate asks for a look at the disk.", (
            (_once("rate(tiered:load_decision_tokens_total[])", " by (decision)"), "{{decision}}"),
        ), is_stacked=True),
        Panel("From both ends", "Requests that computed their front while their back was loaded: only with `--tier-both-ends`.", (
            (_once("rate(tiered:both_ends_requests_total[])"), "requests/s"),
        )),
        Panel("Hints", "What `POST /tier/prefetch` brought to host memory. Many `withdrawn`: host memory is too small for hints; many `expired`: they come too early, or nobody returns.", (
            (_once("rate(tiered:hints_begun_total[])"), "begun/s"),
            (_once("rate(tiered:hints_ended_total[])", " by (outcome)"), "{{outcome}}/s"),
            (_once("rate(tiered:hinted_tokens_total[])"), "tokens/s", "short"),
        )),
    ),
    "Is anything wrong?": (
        Panel("Health", "Of each tier the sickest rank, and whether other servers can be found. 0: misses only; `/server_info` says why under `tier_unhealthy_because:nvme` and its like.", (
            ("min by (instance, tier) (tiered:tier_healthy)", "{{instance}} {{tier}}"),
            ("min by (instance) (tiered:peer_discovery_works)", "{{instance}} finds others"),
        ), width=6),
        Panel("Pages that failed", "`corrupt` and `io_error` on NVMe should be 0: `sglang-tiered store verify DIR`. From the bucket `io_error` and `cancelled` are a slow or failing link. From other servers `missed`: evicted there a moment ago; `lost` and `late`: a server that is dead, stopped or overloaded; `damaged` should be 0.", (
            ('sum by (tier, operation, reason) (rate(tiered:page_outcomes_total{reason!~"ok|duplicate"}[])) > 0', "{{tier}} {{operation}} {{reason}}"),
        ), is_stacked=True),
        Panel("Should be zero", "Regions that cannot be removed (the log names them), messages of other servers that break the protocol, handoff messages that are not admitted, damaged slabs, and lost lines of `--tier-log-requests`.", (
            ("sum (tiered:nvme_stuck_regions)", "stuck regions"),
            ("sum (rate(tiered:peer_breaches_total[]))", "breaches/s"),
            ("sum (rate(tiered:transfer_refused_messages_total[]))", "refused messages/s"),
            ("sum (rate(tiered:transfer_damaged_slabs_total[]))", "damaged slabs/s"),
            ("sum (rate(tiered:request_log_dropped_total[]))", "log lines dropped/s"),
        )),
        Panel("Versions", "Servers by version. Servers that share pages should agree.", (
            ("count by (version, sglang_version) (count by (instance, version, sglang_version) (tiered:build_info))", "{{version}} on {{sglang_version}}"),
        ), width=4),
    ),
    "Are the prices right?": (
        Panel("Prefill speed", "Learnt tokens per second of a cold prompt of 2,048 tokens, per server. Falls with a busy or throttled processor; then more is loaded.", (
            ("avg by (instance) (tiered:prefill_tokens_per_second)", "{{instance}}"),
        )),
        Panel("Load speed", "Learnt and measured should agree within a factor of two; falls while stores compete. Slower than computing means that nothing is loaded.", (
            ("avg by (tier) (tiered:load_bytes_per_second)", "{{tier}} learnt"),
            ("sum by (tier) (rate(tiered:loaded_bytes_total[])) / sum by (tier) (rate(tiered:load_busy_seconds_total[]))", "{{tier}} measured"),
        ), "Bps"),
        Panel("Time of a load", "What a returning request waits for at least; probes are included.", _quantiles("load_duration_seconds", by="tier"), "s"),
        Panel("Time of verification", "Checksums of one read, within its load. Much of the load's time: the processor is short, not the disk.", _quantiles("verification_duration_seconds", by="tier"), "s"),
        Panel("Loads", "Reads per second, probes included.", (
            ("sum by (tier) (rate(tiered:load_duration_seconds_count[]))", "{{tier}}"),
        )),
        Panel("Expected queue", "What a request that arrives now is expected to wait, of the busiest replica, and the prompt tokens before it.", (
            ("max (tiered:expected_queue_wait_seconds)", "wait"),
            (_once("tiered:waiting_tokens"), "tokens", "short"),
        ), "s"),
        Panel("Prices of prefill", "What routers get from `GET /tier/costs`: seconds per batch, token, pair of tokens and token copied. Look at it on a logarithmic axis.", (
            ("avg by (unit) (tiered:prefill_price_seconds)", "{{unit}}"),
        ), "s", 12),
        Panel("Prices of loads", "Likewise, per load and per byte; a tier shows up with its first load.", (
            ("avg by (tier, unit) (tiered:load_price_seconds)", "{{tier}} {{unit}}"),
        ), "s", 12),
    ),
    "What is held where?": (
        Panel("Tokens held", "Of all replicas, and of a bucket once, however many servers share it. What is free to be taken again counts until it is evicted, so a full tier is no trouble.", (
            (_tokens("tier_held_tokens"), "{{tier}}"),
        ), is_stacked=True),
        Panel("Tokens that fit", "The working set that comes back is at most this.", (
            (_tokens("tier_capacity_tokens"), "{{tier}}"),
        ), is_stacked=True),
        Panel("Full", "Payload over capacity. NVMe near 1 is its usual state: it evicts to make room.", (
            ("sum by (tier) (tiered:tier_held_bytes) / (sum by (tier) (tiered:tier_capacity_bytes) > 0)", "{{tier}}"),
        ), "percentunit"),
        Panel("Space", "Physical bytes never pass the cap. Payload (Full) far below them on NVMe: regions full of pages that are no longer held.", (
            (_shared_once("tier_physical_bytes"), "{{tier}} taken"),
            (_shared_once("tier_capacity_bytes", 'sum by (tier) (tiered:tier_capacity_bytes{tier="nvme"} > 0)') + " > 0", "{{tier}} cap"),
        ), "bytes", 12),
        Panel("Shared by servers", "With `--tier-machine-budget`, by server: what it keeps, what it has above that, and what others asked back. Together with what nobody has it is the total.", (
            ("sum by (instance) (tiered:nvme_floor_bytes)", "{{instance}} floor"),
            ("sum by (instance) (tiered:nvme_borrowed_bytes)", "{{instance}} borrowed"),
            ("sum by (instance) (tiered:nvme_recalled_bytes)", "{{instance}} asked back"),
            ("max (tiered:nvme_shared_bytes)", "total"),
        ), "bytes"),
        Panel("Pages and tenants", "Pages that a lookup can hit, of every rank, those of a bucket and of other servers once; on the right the tenants that hold some on NVMe.", (
            (_shared_once("tier_pages", 'sum by (tier) (tiered:tier_pages{tier="nvme"})', "object|peer"), "{{tier}}"),
            ("max by (tier) (tiered:tier_tenants)", "tenants {{tier}}", "none"),
        ), width=12),
    ),
    "Does host memory lose pages?": (
        Panel("Pages that left host memory", "Anything but `clean` was lost without a copy on NVMe, and why.", (
            ("sum by (outcome) (rate(tiered:host_left_pages_total[]))", "{{outcome}}"),
        ), is_stacked=True),
        Panel("Waiting to be spilled", "A line that only rises: the disk cannot keep up with what is computed.", (
            ("sum (tiered:host_dirty_pages)", "dirty pages"),
            (_once("tiered:spill_waiting_tokens"), "waiting tokens"),
            (_once("tiered:spill_inflight_tokens"), "tokens in flight"),
        )),
        Panel("Host copies skipped", "Prefixes on the device that found no room in host memory, and those copied later: host memory is too small for what runs at once.", (
            ("sum (rate(tiered:host_backups_skipped_total[]))", "skipped/s"),
            ("sum (rate(tiered:host_backups_recovered_total[]))", "recovered/s"),
        )),
    ),
    "Does the disk keep up?": (
        Panel("Throughput", "Compare with what the disk can do, which `fio` measures.", (
            ('sum (rate(tiered:loaded_bytes_total{tier="nvme"}[]))', "loaded"),
            ('sum (rate(tiered:copied_bytes_total{tier="nvme"}[]))', "copied"),
            ('sum (rate(tiered:stored_bytes_total{tier="nvme"}[]))', "stored"),
            ('sum (rate(tiered:written_bytes_total{tier="nvme"}[]))', "written"),
            ("sum (rate(tiered:reinserted_bytes_total[]))", "reinserted"),
        ), "Bps"),
        Panel("Codec", "Bytes of pages that `--tier-codec` encoded and decoded, and what was stored of them. On the right 0 while it is measured to cost more than it saves.", (
            ("sum by (operation) (rate(tiered:codec_page_bytes_total[]))", "{{operation}}"),
            ("sum (rate(tiered:codec_stored_bytes_total[]))", "stored of what was encoded"),
            ("sum by (operation) (rate(tiered:codec_seconds_total[]))", "seconds of threads: {{operation}}", "none"),
            ("sum by (operation) (rate(tiered:codec_pages_total[]))", "pages: {{operation}}", "none"),
            ("min (tiered:codec_on)", "on", "none"),
        ), "Bps"),
        Panel("Time of a store", "From submission to durable. Loads go first, so it grows with them.", _quantiles("store_duration_seconds", by="tier"), "s"),
        Panel("Queue", "Jobs submitted and not done, and on the right the payload of stores among them.", (
            ("sum by (tier) (tiered:tier_inflight_jobs)", "{{tier}} jobs"),
            ("sum by (tier) (tiered:tier_queued_store_bytes)", "{{tier}} stores", "bytes"),
        )),
        Panel("Admission", "Pages offered to NVMe. `dropped_backlog`: the disk is too slow for the writes; `dropped_budget`: `--tier-nvme-writes-per-day` is used up; `dropped_first_touch`: pressure, and nothing spoke for the page.", (
            ("sum by (outcome) (rate(tiered:admission_pages_total[]))", "{{outcome}}"),
        ), is_stacked=True),
        Panel("Pages per second", "Evicted about as fast as stored once the cap is reached.", (
            ('sum (rate(tiered:stored_pages_total{tier="nvme"}[]))', "stored"),
            ('sum (rate(tiered:loaded_pages_total{tier="nvme"}[]))', "loaded"),
            ('sum (rate(tiered:copied_pages_total{tier="nvme"}[]))', "copied"),
            ("sum (rate(tiered:copied_from_memory_pages_total[]))", "copied from memory"),
            ('sum (rate(tiered:evicted_pages_total{tier="nvme"}[]))', "evicted"),
            ("sum (rate(tiered:reinserted_pages_total[]))", "reinserted"),
            ("sum (rate(tiered:purged_pages_total[]))", "purged"),
        )),
        Panel("Write amplification", "Bytes written over payload stored. 1.1 is usual; reinsertion makes at most 1.11 of it.", (
            ('sum (rate(tiered:written_bytes_total{tier="nvme"}[])) / sum (rate(tiered:stored_bytes_total{tier="nvme"}[]))', "written over stored"),
        ), "none", 4),
        Panel("Write budget", "What is left for now; it refills evenly over the day. Empty without `--tier-nvme-writes-per-day`.", (
            ("sum (tiered:nvme_write_budget_bytes)", "left"),
        ), "bytes", 4),
    ),
    "What does the bucket do, and cost?": (
        Panel("Requests to the bucket", "What is charged for, without the library's retries; `get` follows returning conversations, `put` what is computed (a page each), `list` the number of servers. `refused`: kinds that the bucket refuses now.", (
            ("sum by (kind) (rate(tiered:object_requests_total[]))", "{{kind}}"),
            ("sum by (kind) (tiered:object_refused)", "{{kind}} refused", "none"),
        ), "reqps"),
        Panel("Traffic of the bucket", "Written stays below `--tier-object-writes-per-day`; what of it was demoted from NVMe.", (
            ('sum (rate(tiered:written_bytes_total{tier="object"}[]))', "written"),
            ('sum (rate(tiered:loaded_bytes_total{tier="object"}[]))', "read"),
            ("sum (rate(tiered:demoted_bytes_total[]))", "demoted"),
        ), "Bps"),
        Panel("Down", "Pages copied from NVMe. A backlog (on the right) that only rises: the link or the budget cannot keep up; `left NVMe too early`: raise the NVMe cap.", (
            ("sum (rate(tiered:demoted_pages_total[]))", "demoted/s"),
            ("sum (rate(tiered:demotion_dropped_pages_total[]))", "dropped/s"),
            ("sum (rate(tiered:demotion_gone_pages_total[]))", "left NVMe too early/s"),
            ("sum (tiered:demotion_backlog_pages)", "backlog", "none"),
        )),
        Panel("Pages of the bucket", "Made durable, read, and no longer found there: too old, or beyond the cap. On the right the bytes of one rank's pages, as last listed.", (
            ('sum (rate(tiered:stored_pages_total{tier="object"}[]))', "stored/s"),
            ('sum (rate(tiered:loaded_pages_total{tier="object"}[]))', "loaded/s"),
            ('sum (rate(tiered:evicted_pages_total{tier="object"}[]))', "gone/s"),
            ("max (tiered:object_listed_bytes)", "listed", "bytes"),
        ), width=12),
        Panel("Up", "Pages of the bucket and of other servers that are now kept on NVMe, those it had no time or room for, and those that another tier could not serve.", (
            ("sum by (tier) (rate(tiered:promoted_pages_total[]))", "{{tier}} promoted/s"),
            ("sum by (tier) (rate(tiered:promotion_dropped_pages_total[]))", "{{tier}} dropped/s"),
            ("sum by (tier) (rate(tiered:recovered_pages_total[]))", "{{tier}} recovered/s"),
        ), width=12),
    ),
    "Do other servers help?": (
        Panel("Other servers", "Those that each server follows, of the same model and settings; those that no page is taken from, as they have not erased the same; and connections that ended, on the right.", (
            ("min by (instance) (tiered:peer_servers)", "{{instance}}"),
            ("max by (instance) (tiered:peer_servers_withheld)", "{{instance}} withheld"),
            ("sum (rate(tiered:peer_failures_total[]))", "failures/s", "short"),
        )),
        Panel("Traffic between servers", "A server whose `served` stands out holds what the others return to: a router that knows prefixes would send them there.", (
            ('sum by (instance) (rate(tiered:loaded_bytes_total{tier="peer"}[]))', "{{instance}} fetched"),
            ("sum by (instance) (rate(tiered:peer_served_bytes_total[]))", "{{instance}} served"),
        ), "Bps"),
        Panel("Pages between servers", "Fetched, given to others, and `refused` when too much is on its way to them; purges told and applied.", (
            ('sum (rate(tiered:loaded_pages_total{tier="peer"}[]))', "fetched/s"),
            ("sum (rate(tiered:peer_served_pages_total[]))", "served/s"),
            ("sum (rate(tiered:peer_refused_pages_total[]))", "refused/s"),
            ("sum by (direction) (rate(tiered:peer_purges_total[]))", "purges {{direction}}/s"),
        )),
    ),
    "Does the handoff work?": (
        Panel("Requests handed over", "With prefill and decode apart: ended by outcome, and on the right those under way. `failed` should be 0: the logs of both sides say why.", (
            ("sum by (outcome) (rate(tiered:transfer_rooms_ended_total[]))", "{{outcome}}/s"),
            ("sum (tiered:transfer_rooms)", "under way", "none"),
        )),
        Panel("KV handed over", "`same_host` is read out of prefill's memory, `wire` crosses the network; each end counts what it sends or receives.", (
            ("sum by (path) (rate(tiered:transfer_bytes_total[]))", "{{path}}"),
        ), "Bps"),
        Panel("Sessions", "With ranks of the other role, and those that ended: a server that went, or a network that fails.", (
            ("sum by (instance) (tiered:transfer_peers)", "{{instance}}"),
            ("sum (rate(tiered:transfer_peers_lost_total[]))", "lost/s", "short"),
        )),
    ),
}
# fmt: on


def expression(short: str) -> str:
    """An expression as Grafana sends it to Prometheus, but for its variables.

    SGLang's own names begin with ``sglang:`` in the text format, and in OpenMetrics, which
    Prometheus prefers, with ``sglang_``: prometheus-client escapes the colon unless the scraper
    asks for any name, as Prometheus 3 does.
    """

    def selected(found: re.Match[str]) -> str:
        labels = OF_RANK if found[1] == "tiered" else OF_SERVER
        selectors = [f'{label}=~"{value}"' for label, value in labels]
        selectors += [found[3]] if found[3] else []
        if found[1] == "tiered":
            return f"{PREFIX}{found[2]}{{{','.join(selectors)}}}"
        return f'{{__name__=~"sglang[:_]{found[2]}",{",".join(selectors)}}}'

    return _METRIC.sub(selected, short).replace("[]", "[$__rate_interval]")


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    targets, overrides = [], []
    for index, (short, legend, *unit) in enumerate(panel.lines):
        name = chr(ord("A") + index)
        targets.append({"refId": name, "expr": expression(short), "legendFormat": legend})
        if unit:
            right = [
                {"id": "unit", "value": unit[0]},
                {"id": "custom.axisPlacement", "value": "right"},
            ]
            matcher = {"id": "byFrameRefID", "options": name}
            overrides.append({"matcher": matcher, "properties": right})
    custom = {"fillOpacity": 30 if panel.is_stacked else 0, "showPoints": "never"}
    stacking = {"stacking": {"mode": "normal"}} if panel.is_stacked else {}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {**custom, **stacking}},
            "overrides": overrides,
        },
        "options": {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull"]},
            "tooltip": {"mode": "multi"},
        },
        "targets": targets,
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Rows from the top down, panels from left to right."""
    number = y = 0
    for title, panels in ROWS.items():
        number, x = number + 1, 0
        row = {"id": number, "type": "row", "title": title, "collapsed": False, "panels": []}
        yield {**row, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}}
        y += 1
        for panel in panels:
            if x + panel.width > 24:
                x, y = 0, y + HEIGHT
            number += 1
            yield _panel(panel, number, x, y)
            x += panel.width
        y += HEIGHT


def _variable(name: str, title: str, label: str, given: str) -> dict[str, Any]:
    """What to choose from: the values of a label. All is any value, also none."""
    query = f"label_values({PREFIX}build_info{{{given}}}, {label})"
    return {
        "name": name,
        "type": "query",
        "label": title,
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def dashboard() -> dict[str, Any]:
    model, instance = 'model_name=~"$model"', 'instance=~"$instance"'
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "title": "sglang-tiered",
        "uid": "sglang-tiered",
        "tags": ["sglang", "kv-cache"],
        "schemaVersion": 39,
        "version": 2,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {**source, "label": "Data source"},
                _variable("model", "Model", "model_name", ""),
                _variable("instance", "Server", "instance", model),
                _variable("replica", "Replica (dp_rank)", "dp_rank", f"{model},{instance}"),
                _variable("rank", "Rank (tp_rank)", "tp_rank", f"{model},{instance}"),
            ]
        },
        "panels": list(_panels()),
    }


def written(value: Any, indent: int = 0) -> str:
    """JSON with what fits into a line in one, so that a change shows as one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= MAX_LINE or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        ends, keys = "{}", [f"{json.dumps(key)}: " for key in value]
        parts = [
            key + written(value[name], indent + 1) for key, name in zip(keys, value, strict=True)
        ]
    else:
        ends, parts = "[]", [written(one, indent + 1) for one in value]
    pad = " " * indent
    return f"{ends[0]}\n{pad} " + f",\n{pad} ".join(parts) + f"\n{pad}{ends[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a change")
    is_check = parser.parse_args(arguments).check
    path = FOLDER / "sglang-tiered.json"
    wanted = written(dashboard()) + "\n"
    is_stale = path.read_text(encoding="utf-8") != wanted
    if is_stale and not is_check:
        path.write_text(wanted, encoding="utf-8")
    if is_stale:
        what = "stale; run python scripts/write_dashboard.py" if is_check else "written"
        print(f"scripts/grafana/{path.name}: {what}")
    return 1 if is_check and is_stale else 0


if __name__ == "__main__":
    sys.exit(main())
