"""``rank_labels``: what tells the series of one rank from those of the others, as SGLang's do."""

from __future__ import annotations

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import (
    get_disagg,
    get_observability,
    get_parallel,
    get_serving,
)

__all__ = ["rank_labels"]


def rank_labels() -> dict[str, str]:
    """Return the labels that SGLang gives the metrics of this scheduler process, as
    ``SchedulerMetricsCollector.init_new`` does: those of ``--extra-metric-labels`` too, and
    ``dp_rank`` only where there are replicas."""
    parallel, disagg = get_parallel(), get_disagg()
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": "dynamic"  # its role may change, and its series do not
        if disagg.enable_pd_role_switch
        else DisaggregationMode.to_engine_type(disagg.disaggregation_mode),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels.update(get_observability().extra_metric_labels or {})
    return {name: str(value) for name, value in labels.items()}
