"""Parts of ``bench_routing_front``: a modelled fleet behind HTTP, and fronts before it."""
