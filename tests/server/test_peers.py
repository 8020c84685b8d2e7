"""What the other pods of a group mean for this one: service as a whole, and no worker leaves while one is needed."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from hpu_engine.contract import GroupMember, ModelIdentity, Phase, PlanInput
from hpu_engine.planning import describe
from hpu_engine.server.errors import ApiError
from hpu_engine.server.metrics import Metrics
from hpu_engine.server.model_files import LoadedModel
from hpu_engine.server.pod.drain import Shutdown, drain
from hpu_engine.server.pod.peers import PeerPod, Peers
from hpu_engine.server.pod.pod import Pod
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.server.requests.admission import Admission
from hpu_engine.server.requests.serving_model import ServingModel
from hpu_engine.text.tokenizer import Tokenizer
from hpu_engine.wire.messages import Ready
from tests.server.conftest import CONFIG


def ready_pod() -> Pod:
    rank = ServedRank(0, Metrics("tiny").for_rank(0))
    plan_input = PlanInput(device="cpu", block_size=128, max_num_seqs=1, max_batched_tokens=1)
    pod = Pod([rank], ModelIdentity(served_name="tiny", path="/m"), plan_input)
    rank.handle(rank.workers[0], Ready())
    pod.has_read_model()
    return pod


async def test_a_pod_is_ready_only_with_its_whole_group() -> None:
    pod = ready_pod()
    assert pod.why_not_ready() is None, "a pod alone is a group"
    pod.see_peers(Peers((PeerPod(1, Phase.READY), PeerPod(2, Phase.WARMING_UP))))
    assert pod.why_not_ready() == "WarmingUp: pod 2 of the group is not ready"
    pod.see_peers(Peers((PeerPod(1, Phase.READY), PeerPod(2, Phase.READY, is_lost=True))))
    assert pod.why_not_ready() == "pod 2 of the group is lost"
    assert pod.why_not_alive() is None, "a kubelet has no reason to restart this one"
    pod.see_peers(Peers((PeerPod(1, Phase.READY), PeerPod(2, Phase.READY))))
    assert pod.why_not_ready() is None


async def test_a_group_that_lost_a_pod_takes_no_request() -> None:
    pod = ready_pod()
    serving = ServingModel(pod, Admission(pod, 1), "tiny", 0)
    serving.has_loaded(LoadedModel(describe(CONFIG, "config.json"), cast(Tokenizer, None)))
    assert serving.model() is not None
    pod.see_peers(Peers((PeerPod(1, Phase.READY, is_lost=True),)))
    with pytest.raises(ApiError, match="pod 1 of the group is lost"):
        serving.model()


async def test_a_drain_lasts_until_the_group_is_idle_or_its_time_is_over() -> None:
    pod = ready_pod()
    serving = ServingModel(pod, Admission(pod, 1), "tiny", 0)
    pod.see_peers(Peers((PeerPod(1, Phase.DRAINING, has_open_requests=True),)))
    draining = asyncio.create_task(drain(serving, Shutdown(), lame_duck_seconds=0.0, drain_seconds=60.0))
    await asyncio.sleep(0.05)
    assert not draining.done()
    assert pod.is_draining
    pod.see_peers(Peers((PeerPod(1, Phase.DRAINING),)))
    await asyncio.wait_for(draining, 10.0)

    pod.see_peers(Peers((PeerPod(1, Phase.DRAINING, has_open_requests=True),)))
    await asyncio.wait_for(drain(serving, Shutdown(), lame_duck_seconds=0.0, drain_seconds=0.05), 10.0)


def test_a_peer_that_is_lost_needs_no_workers() -> None:
    assert Peers((PeerPod(1, Phase.READY, has_open_requests=True, is_lost=True),)).are_idle


def test_a_pod_reads_its_place_in_its_group_from_the_name_the_operator_gives_it() -> None:
    place = GroupMember(group=12, revision="1a2b3c4d", attempt=3, pod_index=0)
    assert GroupMember.from_pod_name("my-model-1a2b3c4d-12-3-0") == place
    for other in ("laptop", "my-model-1a2b3c4d-12-3", "-1a2b3c4d-12-3-0x", "my-model-1A2B3C4D-1-2-3"):
        assert GroupMember.from_pod_name(other) is None
