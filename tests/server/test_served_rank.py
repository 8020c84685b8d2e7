"""How far a pod's start is, from what its workers said last."""

from __future__ import annotations

from hpu_engine.contract import BucketRun, CardHealth, ModelIdentity, Phase, PlanInput, RecipeCache
from hpu_engine.server.metrics import Metrics
from hpu_engine.server.pod.pod import START_UP_STALLED_SECONDS, Pod
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.wire.messages import Heartbeat, Progress, Ready


def pod_of(ranks: int, workers: int) -> Pod:
    metrics = Metrics("tiny")
    served = [ServedRank(number, metrics.for_rank(number), workers) for number in range(ranks)]
    plan_input = PlanInput(device="cpu", block_size=128, max_num_seqs=1, max_batched_tokens=1)
    return Pod(served, ModelIdentity(served_name="tiny", path="/m"), plan_input)


async def test_a_rank_that_waits_for_another_is_not_the_one_that_stalls() -> None:
    pod = pod_of(2, 1)
    ahead, behind = pod.ranks
    ahead.handle(ahead.workers[0], Progress(phase=Phase.CONNECTING))
    behind.handle(behind.workers[0], Progress(phase=Phase.LOADING, done=1, total=2))
    ahead.workers[0].progress_at -= START_UP_STALLED_SECONDS + 1
    assert pod.why_not_alive() is None
    assert pod.state().seconds_since_progress < 60
    behind.workers[0].progress_at -= START_UP_STALLED_SECONDS + 1
    assert (pod.why_not_alive() or "").startswith("rank 1: Loading has not moved")


async def test_a_warm_up_is_that_of_the_slowest_worker_with_what_its_buckets_took() -> None:
    pod = pod_of(1, 2)
    (rank,) = pod.ranks
    fast, slow = rank.workers
    rank.handle(fast, Ready())
    rank.handle(slow, Progress(phase=Phase.WARMING_UP, done=0, total=3, current="a", planned_seconds=4.0))
    assert rank.state().warm_up.planned_seconds == 4.0
    assert rank.state().warm_up.compiled is None, "nothing has said whether recipes were compiled"
    runs = (BucketRun(bucket="a", seconds=1.5, compiled=True), BucketRun(bucket="b", seconds=0.5, compiled=False))
    for done, run in enumerate(runs, 1):
        rank.handle(slow, Progress(phase=Phase.WARMING_UP, done=done, total=3, current="c", ran=run))
    found = rank.state()
    assert (found.phase, found.warm_up.done, found.warm_up.planned_seconds) == (Phase.WARMING_UP, 2, None)
    assert (found.warm_up.runs, found.warm_up.compiled) == (runs, 1)
    rank.handle(slow, Ready())
    assert rank.became_ready.is_set()


async def test_cards_and_recipes_are_known_when_a_worker_has_told_of_them() -> None:
    pod = pod_of(1, 2)
    (rank,) = pod.ranks
    assert rank.state().recipe_cache is None
    assert [worker.card for worker in rank.state().workers] == [None, None]
    nothing = Heartbeat(steps=0, running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=0)
    rank.handle(rank.workers[0], nothing)
    broken = CardHealth(healthy=False, problem="ECC")
    for worker, cache in zip(rank.workers, (RecipeCache(hits=1, misses=2), RecipeCache(hits=3, misses=0)), strict=True):
        beat = Heartbeat(
            steps=0, running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=0, recipe_cache=cache, card=broken
        )
        rank.handle(worker, beat)
    assert rank.state().recipe_cache == RecipeCache(hits=4, misses=2)
    assert [worker.card for worker in rank.state().workers] == [broken, broken]


async def test_bytes_of_a_download_are_the_pods() -> None:
    pod = pod_of(1, 1)
    assert pod.state().downloaded_bytes is None
    (rank,) = pod.ranks
    rank.handle(rank.workers[0], Progress(phase=Phase.FETCHING, done=3, total=7))
    state = pod.state()
    assert (state.phase, state.downloaded_bytes, state.download_bytes) == (Phase.FETCHING, 3, 7)
    assert state.ranks[0].loaded_bytes == 0
