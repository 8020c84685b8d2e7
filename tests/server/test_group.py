"""A pod of two ranks with two workers each: it starts, serves, fails and leaves as one. The workers are scripted."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from hpu_engine.contract import ExitCode, FailureReason, Phase
from tests.server.running import RunningServer, get, is_alive, kill, wait_until
from tests.server.test_lifecycle import Background

TWO_BY_TWO: dict[str, Any] = {"ranks": 2, "tensor": 2}
CULPRIT = {"end_after_seconds": 0.05, "die_with_code": 1, "die_saying": "ValueError: a bad scale\n"}
VICTIM = {
    "end_after_seconds": 0.0,
    "fatal": {"reason": "PeerLost", "message": "rank 1, worker 0 closed its connection"},
}


def open_requests(server: RunningServer) -> list[int]:
    return [rank.running for rank in server.state().ranks]


def test_a_pod_is_as_far_as_its_slowest_worker_and_holds_what_the_smallest_rank_holds(shell: Path) -> None:
    script = {"workers": {"1.0": {"num_kv_blocks": 2, "max_model_len": 300}, "0.1": {"num_kv_blocks": 8}}}
    with RunningServer(shell, script, held=("load@1.1", "tokens=64@0.1"), **TWO_BY_TWO) as server:
        server.wait_until_listening()

        def phases() -> list[list[Phase]]:
            return [[worker.phase for worker in rank.workers] for rank in server.state().ranks]

        behind = [[Phase.READY, Phase.WARMING_UP], [Phase.READY, Phase.LOADING]]
        wait_until(lambda: phases() == behind, "one worker of each rank is behind", server)
        state = server.state()
        assert [rank.phase for rank in state.ranks] == [Phase.WARMING_UP, Phase.LOADING]
        assert (state.ranks[0].warm_up.done, state.ranks[0].warm_up.current) == (2, "tokens=64")
        assert (state.ranks[1].loaded_bytes, state.ranks[1].total_bytes) == (1000, 2000)
        assert state.phase is Phase.LOADING
        assert get(f"{server.control_url}/readyz")[0] == 503
        server.release("load@1.1")
        server.wait_for_phase(Phase.WARMING_UP)
        assert server.state().ranks[1].phase is Phase.READY or phases()[1] == [Phase.READY, Phase.WARMING_UP]
        assert get(f"{server.control_url}/readyz")[0] == 503
        server.release("tokens=64@0.1")
        server.wait_until_ready()
        state = server.state()
        assert (state.plan_input.kv_blocks, state.model.max_model_len) == (2, 256)
        blocks = [
            server.metric("vllm:cache_config_info", engine=engine, num_gpu_blocks=n) for engine, n in ("08", "12")
        ]
        assert blocks == [1, 1]


def test_requests_go_to_the_rank_with_fewer_and_workers_stay_until_both_ranks_are_idle(shell: Path) -> None:
    held = ("step@0.0", "step@1.0")
    with RunningServer(shell, {}, held=held, **TWO_BY_TWO).wait_until_ready() as server:
        requests = [Background(server, max_tokens=5) for _ in range(4)]
        wait_until(lambda: open_requests(server) == [2, 2], "each rank has two", server)
        workers = server.worker_pids().values()
        assert len(set(workers)) == 4
        server.signal(signal.SIGTERM)
        server.wait_for_phase(Phase.DRAINING)
        server.release("step@0.0")
        wait_until(lambda: open_requests(server) == [0, 2], "one rank is idle", server)
        assert [server.metric("vllm:generation_tokens_total", engine=engine) for engine in "01"] == [10, 0]
        assert all(map(is_alive, workers)), "the idle rank's workers are needed by the other rank's"
        server.release("step@1.0")
        assert [request.result()[0] for request in requests] == [200] * 4
        assert server.exit_code() == ExitCode.OK
        assert not any(map(is_alive, workers))


def test_a_worker_that_lost_its_peer_first_is_a_victim_and_the_culprit_is_named(shell: Path) -> None:
    script = {"workers": {"0.0": VICTIM, "0.1": VICTIM, "1.0": CULPRIT, "1.1": VICTIM}}
    with RunningServer(shell, script, held=("end",), failed_linger_seconds=0.5, **TWO_BY_TWO) as server:
        server.wait_until_ready()
        workers = server.worker_pids().values()
        server.release("end")
        assert server.exit_code() == ExitCode.WORKER_LOST
        told = server.termination()
        assert (told.reason, told.rank, told.worker, told.exit_code) == (FailureReason.WORKER_LOST, 1, 0, 1)
        assert "ValueError: a bad scale" in told.message
        assert told.seen_at is not None
        assert not any(map(is_alive, workers))


def test_a_pod_with_victims_only_says_that_the_cause_is_elsewhere(shell: Path) -> None:
    with RunningServer(
        shell, {"workers": {"0.0": VICTIM}}, held=("end",), failed_linger_seconds=0.0, **TWO_BY_TWO
    ) as server:
        server.wait_until_ready().release("end")
        assert server.exit_code() == ExitCode.GROUP
        told = server.termination()
        assert (told.reason, told.rank, told.worker) == (FailureReason.PEER_LOST, 0, 0)


def test_a_killed_follower_ends_the_streams_of_all_ranks_and_is_named(shell: Path) -> None:
    with RunningServer(shell, {}, held=("step",), failed_linger_seconds=0.5, **TWO_BY_TWO) as server:
        server.wait_until_ready()
        requests = [Background(server, max_tokens=5) for _ in range(2)]
        wait_until(lambda: open_requests(server) == [1, 1], "each rank has one", server)
        workers = server.worker_pids()
        kill(workers[1, 1], signal.SIGKILL)
        assert [request.result()[0] for request in requests] == [500, 500]
        assert server.exit_code() == ExitCode.WORKER_LOST
        told = server.termination()
        assert (told.rank, told.worker, told.signal) == (1, 1, "SIGKILL")
        assert f"rank 1, worker 1 (pid {workers[1, 1]})" in told.message
        assert not any(map(is_alive, workers.values()))
