"""The operator's own metrics, in a separate registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """What is counted. Names start with `hpu_operator_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconciles = Counter(
            "hpu_operator_reconcile", "Reconciles by result.", ["result"], registry=self.registry
        )
        self._reconcile_seconds = Histogram(
            "hpu_operator_reconcile_seconds", "Duration of one reconcile.", registry=self.registry
        )
        self._api_seconds = Histogram(
            "hpu_operator_api_seconds",
            "Duration of calls to the API server. Code 0: no answer.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self._events = Counter(
            "hpu_operator_watch_events", "Events received from watches.", ["resource"], registry=self.registry
        )
        self.leader = Gauge("hpu_operator_leader", "1 on the replica that holds the lease.", registry=self.registry)
        self.queue_depth = Gauge(
            "hpu_operator_queue_depth", "Objects waiting for a reconcile now.", registry=self.registry
        )
        self._cached = Gauge(
            "hpu_operator_cached_objects", "Objects in the cache.", ["resource"], registry=self.registry
        )
        self.control_requests = Counter(
            "hpu_operator_control_requests", "Requests to control endpoints.", ["result"], registry=self.registry
        )

    def reconciled(self, result: str, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._reconcile_seconds.observe(seconds)

    def api_call(self, verb: str, resource: str, code: int, seconds: float) -> None:
        self._api_seconds.labels(verb, resource, str(code)).observe(seconds)

    def event_seen(self, resource: str) -> None:
        self._events.labels(resource).inc()

    def cached(self, resource: str, count: int) -> None:
        self._cached.labels(resource).set(count)
