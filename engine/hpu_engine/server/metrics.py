"""What `/metrics` shows. vLLM's names, units and buckets, so that its dashboards and autoscalers read this server too.

What vLLM has no word for begins with `hpu_engine:`. `engine` is the rank. A value comes from the worker's heartbeats
(gauges) or from what the server itself saw.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from hpu_engine.wire.messages import Heartbeat, StepOutputs

__all__ = ["CONTENT_TYPE_LATEST", "Metrics", "RankMetrics"]

_LABELS = ("model_name", "engine")
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_REQUEST_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """All series of one server, in their own registry."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # an unused second series for every counter
        self.registry = CollectorRegistry()
        self._model_name = model_name
        r = self.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*_LABELS, *labels), registry=r)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, _LABELS, registry=r)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, registry=r, buckets=buckets)

        self.running = gauge("num_requests_running", "Requests in the running batch.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for their first step.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Used part of the KV cache; 1 is all of it.")
        self.preemptions = counter("num_preemptions", "Requests whose KV blocks were taken away for another's.")
        self.prefix_queries = counter("prefix_cache_queries", "Tokens looked for in the prefix cache, at admission.")
        self.prefix_hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of accepted requests; once for all of its samples."
        )
        self.generation_tokens = counter("generation_tokens", "Output tokens that were part of an answer.")
        self.finished = counter("request_success", "Requests by how they ended.", "finished_reason")
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "Between two tokens.", _TOKEN_SECONDS)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", _TOKEN_SECONDS
        )
        self.queue = histogram(
            "request_queue_time_seconds", "Arrival to the first step of a request.", _REQUEST_SECONDS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "First step to first token of a request.", _REQUEST_SECONDS
        )
        self.decode = histogram("request_decode_time_seconds", "First to last token of a request.", _REQUEST_SECONDS)
        self.end_to_end = histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_SECONDS)
        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _REQUEST_TOKENS)
        self.request_output = histogram("request_generation_tokens", "Output tokens of a request.", _REQUEST_TOKENS)
        self.step_tokens = histogram("iteration_tokens_total", "Tokens in one step.", _STEP_TOKENS)
        self.first_seen_shapes = Counter(
            "hpu_engine:first_seen_shapes", "Shapes that ran for the first time after warm-up.", _LABELS, registry=r
        )
        self.cache_config = Gauge(
            "vllm:cache_config_info",
            "The KV cache in numbers.",
            (*_LABELS, "block_size", "num_gpu_blocks"),
            registry=r,
        )

    def for_rank(self, rank: int) -> RankMetrics:
        return RankMetrics(self, (self._model_name, str(rank)))

    def encode(self) -> bytes:
        return generate_latest(self.registry)


class RankMetrics:
    """The series of one rank. Looks its labels up once, not once a token."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str]) -> None:
        self._metrics = metrics
        self._labels = labels
        self._seen = Heartbeat(steps=0, running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=0)
        self.running = metrics.running.labels(*labels)
        self.waiting = metrics.waiting.labels(*labels)
        self.kv_usage = metrics.kv_usage.labels(*labels)
        self.preemptions = metrics.preemptions.labels(*labels)
        self.prefix_queries = metrics.prefix_queries.labels(*labels)
        self.prefix_hits = metrics.prefix_hits.labels(*labels)
        self.prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self.generation_tokens = metrics.generation_tokens.labels(*labels)
        self.first_token = metrics.first_token.labels(*labels)
        self.inter_token = metrics.inter_token.labels(*labels)
        self.per_token = metrics.per_token.labels(*labels)
        self.queue = metrics.queue.labels(*labels)
        self.prefill = metrics.prefill.labels(*labels)
        self.decode = metrics.decode.labels(*labels)
        self.end_to_end = metrics.end_to_end.labels(*labels)
        self.request_prompt = metrics.request_prompt.labels(*labels)
        self.request_output = metrics.request_output.labels(*labels)
        self.step_tokens = metrics.step_tokens.labels(*labels)
        self.first_seen_shapes = metrics.first_seen_shapes.labels(*labels)
        self.finished = {
            reason: metrics.finished.labels(*labels, reason) for reason in ("stop", "length", "abort", "error")
        }

    def set_cache(self, block_size: int, num_blocks: int) -> None:
        self._metrics.cache_config.labels(*self._labels, str(block_size), str(num_blocks)).set(1)

    def see_heartbeat(self, beat: Heartbeat) -> None:
        self.running.set(beat.running)
        self.waiting.set(beat.waiting)
        self.kv_usage.set(beat.kv_blocks_used / beat.kv_blocks_total if beat.kv_blocks_total else 0.0)
        self.preemptions.inc(max(0, beat.preemptions - self._seen.preemptions))
        self.prefix_queries.inc(max(0, beat.prefix_queries - self._seen.prefix_queries))
        self.prefix_hits.inc(max(0, beat.prefix_hits - self._seen.prefix_hits))
        self.first_seen_shapes.inc(max(0, beat.first_seen_shapes - self._seen.first_seen_shapes))
        self._seen = beat

    def see_step(self, step: StepOutputs) -> None:
        self.step_tokens.observe(step.batched_tokens)
