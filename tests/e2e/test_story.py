"""From an installed operator to an answer, through everything that happens to a model in service, to nothing left."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hpu_operator.api.reasons import Reason, is_failure
from tests.cluster import ports
from tests.demo import progress, question
from tests.demo.next_steps import environment, next_steps
from tests.demo.progress import Object
from tests.e2e.clients import at_work, wait_for
from tests.e2e.serving import (
    LABEL,
    NAME,
    OPERATOR,
    READY_SECONDS,
    Serving,
    audit,
    fewest_ready,
    identity,
    is_ready,
    restarts,
    wait_until_quiet,
    writes_of_operator,
)

pytestmark = pytest.mark.timeout(900)


def only(pods: list[Object]) -> Object:
    assert len(pods) == 1, [pod["metadata"]["name"] for pod in pods]
    return pods[0]


def test_apply_becomes_ready_for_true_reasons_and_answers(
    installed: Serving, record_property: Callable[[str, object], None]
) -> None:
    reasons: list[str] = []
    began = time.monotonic()
    installed.apply()
    while True:
        item = installed.read()
        ready = progress.condition(item, "Ready")
        if ready and ready["reason"] not in reasons[-1:]:
            reasons.append(ready["reason"])
        pods = installed.pods()
        if progress.is_ready(item):
            break
        assert time.monotonic() - began < READY_SECONDS, f"{progress.describe(item)} after {reasons}"
        time.sleep(0.1)
    assert is_ready(only(pods)), "Ready was said before the pod was"
    with installed.kube.forwarded(f"service/{NAME}", 8000) as url:
        answer = question.ask(
            f"{url}/v1", NAME, "Please tell me the capital of France.", max_tokens=24, write=lambda _: None
        )
    first = time.monotonic() - began - answer.total_seconds + answer.first_token_seconds
    print(f"apply to first token: {first:.1f} s; reasons on the way: {', '.join(reasons)}")
    record_property("apply_to_first_token_seconds", round(first, 1))
    assert "Paris" in answer.text
    assert answer.tokens > 1
    assert reasons[-1] == "Answering"
    assert not [reason for reason in reasons if is_failure(Reason(reason))], reasons
    shown = installed.kube.kubectl("get", "hpui", NAME)
    print(shown)
    assert shown.split()[:8] == ["NAME", "READY", "REASON", "DESIRED", "READY", "COUNT", "WARM-UP", "MODEL"]
    assert shown.splitlines()[1].split()[:5] == [NAME, "True", "Answering", "1", "1"]


def test_the_commands_that_the_demo_ends_with_work_as_printed(serving: Serving) -> None:
    steps = {step.does: step.command for step in next_steps(NAME, port=ports.choose(1)[0])}
    forward = steps.pop("reach it from here, on loopback")
    forwarding = subprocess.Popen(["bash", "-c", f"{environment(serving.kube)}; exec {forward.removesuffix(' &')}"])
    try:
        for does in ("ask it yourself", "see what it says about itself", "read the operator's log", "scale it"):
            wait_for(does, partial(_says_something, serving, steps[does]), 240, every_seconds=1)
        assert _says_something(serving, f"KUBE_EDITOR=true {steps['change it, and watch it roll']}")
        assert _says_something(serving, f"timeout 20 {steps['watch it']}; [ $? = 124 ]"), (
            "it goes on until it is stopped"
        )
    finally:
        forwarding.terminate()
        forwarding.wait(timeout=60)
    assert serving.read()["spec"]["replicas"] == 2
    serving.wait_ready()


def _says_something(serving: Serving, command: str) -> bool:
    shell = ["timeout", "120", "bash", "-c", f"{environment(serving.kube)}; {command}"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    print(f"$ {command}\n{done.stdout[-600:]}{done.stderr[-600:]}")
    return done.returncode == 0 and bool(done.stdout + done.stderr)


def test_a_killed_worker_is_told_and_the_pod_recovers_in_place(serving: Serving, tmp_path: Path) -> None:
    before = only(serving.pods())
    name = before["metadata"]["name"]
    earlier = len(serving.events("WorkerLost"))
    with at_work(serving.fleet, serving.url, NAME, tmp_path) as clients:
        clients["kept"].wait_for(1)
        serving.kube.kubectl("exec", name, "--", "python3", "-c", _KILL_WORKER)
        wait_for("the event that tells of it", lambda: len(serving.events("WorkerLost")) > earlier, 120)
        for client in clients.values():
            wait_for("the client's error", client.wrong, 120)
    told = serving.events("WorkerLost")[-1]
    assert "SIGKILL" in told["message"], told
    broken = [client.wrong()[0] for client in clients.values()]
    assert any(text.startswith("error event: ") for text in broken), "a stream that cannot go on says so"
    serving.wait_ready()
    after = only(serving.pods())
    assert identity(after) == (before["metadata"]["uid"], restarts(before) + 1)
    assert after["metadata"]["labels"][f"{LABEL.partition('/')[0]}/attempt"] == "0"
    died = after["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert died["exitCode"] == 5
    assert "SIGKILL" in died["message"]


_KILL_WORKER = """
import os, pathlib, signal
def parent(pid): return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
pids = [int(entry.name) for entry in pathlib.Path("/proc").iterdir() if entry.name.isdigit()]
workers = [pid for pid in pids if parent(pid) == 1 and pid != os.getpid()]
torch = [pid for pid in workers if "libtorch" in pathlib.Path(f"/proc/{pid}/maps").read_text()]
assert len(torch) == 1, (pids, workers, torch)
os.kill(torch[0], signal.SIGKILL)
"""


def test_a_deleted_pod_comes_back_in_the_same_group(serving: Serving) -> None:
    before = only(serving.pods())
    children = {child for child in serving.children() if not child.startswith("EndpointSlice")}
    serving.kube.kubectl("delete", "pod", before["metadata"]["name"], "--wait=false")
    wait_for(
        "the pod's end", lambda: all(pod["metadata"]["uid"] != before["metadata"]["uid"] for pod in serving.pods()), 120
    )
    serving.wait_ready()
    assert only(serving.pods())["metadata"]["name"] == before["metadata"]["name"]
    assert {child for child in serving.children() if not child.startswith("EndpointSlice")} == children


def test_the_operator_killed_changes_nothing_and_writes_nothing(serving: Serving) -> None:
    written = wait_until_quiet(serving)
    before, stored = only(serving.pods()), serving.read()
    operator = serving.kube.list("pods", namespace="hpu-system", selector="app.kubernetes.io/name=hpu-operator")[0]
    serving.kube.kubectl(
        *("-n", "hpu-system", "exec", operator["metadata"]["name"], "--"),
        *("python3", "-c", "import os, signal; os.kill(1, signal.SIGTERM)"),
    )
    wait_for(
        "the operator's restart",
        lambda: _lease_holder(serving) and _operator_restarts(serving) > restarts(operator),
        120,
    )
    restarted = serving.fleet.audit_log.stat().st_size
    wait_for("four renewals of the lease", lambda: len(writes_of_operator(serving, restarted, leases=True)) >= 4, 120)
    assert identity(only(serving.pods())) == identity(before)
    assert writes_of_operator(serving, written) == []
    assert serving.read() == stored


def _operator_restarts(serving: Serving) -> int:
    pods = serving.kube.list("pods", namespace="hpu-system", selector="app.kubernetes.io/name=hpu-operator")
    return max(restarts(pod) for pod in pods)


def _lease_holder(serving: Serving) -> str:
    lease = serving.kube.get("lease", "hpu-operator", namespace="hpu-system")
    return str(lease["spec"].get("holderIdentity") or "") if lease else ""


def test_scaling_to_two_and_back_leaves_the_first_group_alone(serving: Serving) -> None:
    before = only(serving.pods())
    serving.kube.kubectl("scale", "hpui", NAME, "--replicas=2")
    serving.wait_ready()
    both = serving.pods()
    assert len(both) == 2
    assert all(is_ready(pod) for pod in both)
    assert identity(before) in [identity(pod) for pod in both]
    serving.kube.kubectl("scale", "hpui", NAME, "--replicas=1")
    serving.wait_ready()
    wait_for("the second group's end", lambda: len(serving.pods()) == 1, 120)
    assert identity(only(serving.pods())) == identity(before)


def test_a_changed_budget_rolls_while_clients_stream_without_an_error(serving: Serving, tmp_path: Path) -> None:
    serving.patch({"replicas": 2})
    serving.wait_ready()
    before = {pod["metadata"]["uid"] for pod in serving.pods()}
    revision = serving.read()["status"]["revision"]
    with at_work(serving.fleet, serving.url, NAME, tmp_path) as clients:
        for client in clients.values():
            client.wait_for(2)
        with fewest_ready(serving) as samples:
            budget = 256 if serving.read()["spec"]["engine"]["chunkedPrefill"].get("maxBatchedTokens") != 256 else 512
            serving.patch({"engine": {"chunkedPrefill": {"maxBatchedTokens": budget}}})
            serving.wait_ready(timeout_seconds=600)
            wait_for("the last old pod's end", lambda: len(serving.pods()) == 2, 180)
        for client in clients.values():
            client.wait_for(2)
    after = serving.pods()
    assert serving.read()["status"]["revision"] != revision
    assert not before & {pod["metadata"]["uid"] for pod in after}
    assert all(f"--max-num-batched-tokens={budget}" in pod["spec"]["containers"][0]["args"] for pod in after)
    assert min(samples) >= 1, "both groups were down at once"
    for client in clients.values():
        print(f"{client.mode}: {len(client.finished())} answers, {len(client.wrong())} errors")
        assert client.wrong() == []


def test_deleting_the_object_leaves_nothing(serving: Serving) -> None:
    assert serving.children()
    serving.kube.kubectl("delete", "hpui", NAME)
    wait_for("the end of every child", lambda: not serving.children(), 120)
    assert serving.kube.get("hpui", NAME) is None
    assert serving.kube.get("pvc", "models") is not None, "the claim is the user's"


def test_the_operator_was_never_refused_and_stayed_small(installed: Serving) -> None:
    """Last in this file: it looks back on everything above."""
    refused = [
        f"{entry['verb']} {entry['requestURI']}"
        for entry in audit(installed)
        if entry["user"]["username"] == OPERATOR and entry.get("responseStatus", {}).get("code") == 403
    ]
    assert refused == []
    operator = installed.kube.list("pods", namespace="hpu-system", selector="app.kubernetes.io/name=hpu-operator")[0]
    status = installed.kube.kubectl(
        "-n", "hpu-system", "exec", operator["metadata"]["name"], "--", "cat", "/proc/1/status"
    )
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    print(f"operator: {resident / 1024:.0f} MB resident")
    assert resident / 1024 <= 120
