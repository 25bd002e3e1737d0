"""ASYNC. Figures of tenants as Prometheus families. Labels are bounded: only configured names, and few reasons."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.tenant_desk import TenantDesk

_COUNTERS = (
    ("requests", "Requests let in past the tenant's limit of requests at once.", "num_requests"),
    ("prompt_tokens", "Prompt tokens of the tenant's requests that a replica accepted.", "num_prompt_tokens"),
    ("generation_tokens", "Output tokens of the tenant that reached the HTTP edge.", "num_generated_tokens"),
)


def tenant_families(desk: TenantDesk, router: str) -> Iterator[Metric]:
    """All that is exported of tenants."""
    figures = desk.figures()
    for name, text, field in _COUNTERS:
        counter = CounterMetricFamily(f"shoal_tenant_{name}", text, labels=["router", "tenant"])
        for tenant, found in figures.items():
            counter.add_metric([router, tenant], getattr(found, field))
        yield counter
    refusals = CounterMetricFamily(
        "shoal_tenant_refusals", "Requests of the tenant that were refused.", labels=["router", "tenant", "reason"]
    )
    for tenant, found in figures.items():
        for reason, count in found.refusals.items():
            refusals.add_metric([router, tenant, reason], count)
    yield refusals
    running = GaugeMetricFamily(
        "shoal_tenant_requests_running",
        "Requests of the tenant that were let in and have not ended.",
        labels=["router", "tenant"],
    )
    for tenant, found in figures.items():
        running.add_metric([router, tenant], found.num_running)
    yield running
    bad = CounterMetricFamily("shoal_tenant_file_failures", "Tenant files that could not be used.", labels=["router"])
    bad.add_metric([router], desk.num_bad_files)
    yield bad
    good = GaugeMetricFamily(
        "shoal_tenant_file_ok", "1: the tenants in force are those of the file, or there is none.", labels=["router"]
    )
    good.add_metric([router], float(desk.is_file_good))
    yield good
