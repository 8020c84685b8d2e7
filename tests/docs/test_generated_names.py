"""docs/generated-names.md is true: its example is rendered here, and every name in it is one that came out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from hpu_operator.api.inference import Spec
from hpu_operator.domain import desired, names, revision
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.owner import Owner
from tests.chart.rendering import render

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "generated-names.md").read_text()
OBJECT = yaml.safe_load(PAGE[PAGE.index("```yaml") + len("```yaml") : PAGE.index("```\n\nA test")])
SPEC = Spec.model_validate(OBJECT["spec"])
OWNER = Owner(OBJECT["metadata"]["namespace"], OBJECT["metadata"]["name"], "uid")
REVISION = revision.revision_of(SPEC)
RECORD = desired.render_record(OWNER, SPEC, REVISION, 1, "engine:1")


def children() -> list[dict[str, Any]]:
    groups = [desired.stateful_set(OWNER, GroupId(index, REVISION, 0), RECORD) for index in range(SPEC.replicas)]
    return [desired.service(OWNER), desired.ranks_service(OWNER), revision.record_manifest(OWNER, RECORD), *groups]


def mentions(text: str) -> bool:
    return f"`{text}`" in PAGE


def test_every_child_of_the_example_is_on_the_page() -> None:
    for child in children():
        assert mentions(child["metadata"]["name"]), child["metadata"]["name"]
    assert mentions(f"{names.stateful_set(OWNER.name, GroupId(0, REVISION, 0))}-0"), "the pod"


def test_every_label_and_annotation_is_on_the_page_and_the_page_has_no_other() -> None:
    pod = desired.stateful_set(OWNER, GroupId(0, REVISION, 0), RECORD)["spec"]["template"]["metadata"]
    metadata = [child["metadata"] for child in children()] + [pod]
    keys = {key for item in metadata for part in ("labels", "annotations") for key in item.get(part, {})}
    keys |= {names.LEFT_SERVICE_ANNOTATION, names.COMPLETED_ANNOTATION}
    on_the_page = set(re.findall(r"`((?:serving\.hpu\.dev|app\.kubernetes\.io)/[a-z-]+)`", PAGE))
    assert on_the_page == keys


def test_every_argument_variable_port_volume_and_path_of_the_container_is_on_the_page() -> None:
    pod = desired.stateful_set(OWNER, GroupId(0, REVISION, 0), RECORD)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    shown = PAGE[PAGE.index("hpu-engine serve") :]
    assert [line.strip() for line in shown[: shown.index("```")].splitlines()] == [
        f"{container['command'][0]} {container['args'][0]}",
        *container["args"][1:],
    ]
    assert {variable["name"] for variable in container["env"]} == set(
        re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE)
    )
    for port in container["ports"]:
        assert f"`{port['name']}` {port['containerPort']}" in PAGE
    for volume, mount in zip(pod["volumes"], container["volumeMounts"], strict=True):
        assert mentions(mount["mountPath"])
        assert f"volume `{volume['name']}`" in PAGE
    assert f"`terminationGracePeriodSeconds` is {pod['terminationGracePeriodSeconds']}" in PAGE
    assert mentions(container["terminationMessagePath"])


def test_long_names_are_shortened_as_shown() -> None:
    long = next(name for name in re.findall(r"`([a-z0-9-]+)`", PAGE) if len(name) > names.MAX_BASE and "-0" not in name)
    assert mentions(names.service(long))
    assert mentions(names.ranks_service(long))
    assert mentions(names.stateful_set(long, GroupId(0, REVISION, 0)))


def test_every_object_of_the_chart_is_on_the_page() -> None:
    for manifest in render(release="hpu-operator", namespace="hpu-system"):
        assert mentions(manifest["metadata"]["name"]), manifest["metadata"]["name"]
