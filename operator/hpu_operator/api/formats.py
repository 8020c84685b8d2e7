"""Words whose form Kubernetes prescribes: names, keys, paths, image references. Each says what would be right.

A word that Kubernetes refuses only when a pod is made, or that a node stumbles over, is refused at `kubectl apply`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpu_operator.api.schema import rule, rules

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}([.]{_LABEL})*"
_NAME_PART = "([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]"
DOMAIN_NAME = f"{_SUBDOMAIN}/{_NAME_PART}"
QUALIFIED_NAME = f"^({_SUBDOMAIN}/)?{_NAME_PART}$"
"""A label's or an annotation's key: at most 63 characters, after an optional domain and a slash."""

OBJECT_NAME = f"^{_SUBDOMAIN}$"
_ALNUM = "[a-z0-9]+"
_PATH_PART = f"{_ALNUM}(([.]|_|__|-+){_ALNUM})*"
_HOST_PART = "[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_HOST = rf"({_HOST_PART}([.]{_HOST_PART})*|\\[[0-9a-fA-F:]+\\])(:[0-9]+)?"
_TAG = "[A-Za-z0-9_][-A-Za-z0-9_.]{0,127}"
_DIGEST = "(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})"
IMAGE_REFERENCE = f"^({_HOST}/)?{_PATH_PART}(/{_PATH_PART})*(:{_TAG})?(@{_DIGEST})?$"
"""As containerd parses it: https://pkg.go.dev/github.com/distribution/reference."""

KEY_FORM = "letters, digits, -, _ and . (at most 63), beginning and ending with a letter or digit, "
KEY_FORM += "after an optional DNS name and /, such as example.com/team"


Name = Annotated[str, Field(min_length=1, max_length=253)]

ObjectName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=253,
        json_schema_extra=rules(
            rule(
                f"self.matches('{OBJECT_NAME}')",
                "not the name of an object: use a-z, 0-9, - and ., beginning and ending with a letter or digit",
            )
        ),
    ),
]
"""Of a Secret, a ConfigMap, a claim, a class: a DNS subdomain."""

NamespaceName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=63,
        json_schema_extra=rules(
            rule(f"self.matches('^{_LABEL}$')", "not the name of a namespace: use a-z, 0-9 and - (not first or last)")
        ),
    ),
]

LabelKey = Annotated[
    str,
    Field(
        min_length=1,
        max_length=316,
        json_schema_extra=rules(rule(f"self.matches('{QUALIFIED_NAME}')", f"not the key of a label: use {KEY_FORM}")),
    ),
]


def keys_are(pattern: str, what: str, form: str) -> dict[str, str]:
    """A rule for a map: all of its keys have a form; the answer names one that has not."""
    return rule(
        f"self.all(k, k.matches('{pattern}'))",
        f"not {what}: use {form}",
        computed=f"'\"%s\" is not {what}: use {form}'.format([self.filter(k, !k.matches('{pattern}'))[0]])",
    )


KEYS_OF_LABELS = keys_are(QUALIFIED_NAME, "the key of a label", KEY_FORM)

LabelValue = Annotated[
    str,
    Field(
        max_length=63,
        json_schema_extra=rules(
            rule(
                f"self.matches('^({_NAME_PART})?$')",
                "not the value of a label: use letters, digits, -, _ and ., with a letter or digit first and last",
            )
        ),
    ),
]

DataKey = Annotated[
    str,
    Field(
        min_length=1,
        max_length=253,
        json_schema_extra=rules(
            rule(
                "self.matches('^[-._a-zA-Z0-9]+$') && !self.startsWith('..') && self != '.'",
                "not the key of a Secret or ConfigMap: use letters, digits, -, _ and .",
            )
        ),
    ),
]

ImageName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=512,
        json_schema_extra=rules(
            rule(
                f"self.matches('{IMAGE_REFERENCE}')",
                "not an image: write [HOST[:PORT]/]REPOSITORY[:TAG][@sha256:DIGEST] without a scheme or spaces, "
                "the repository in lower case, such as registry.example.com/hpu/engine-cpu:1.0",
            )
        ),
    ),
]

AbsolutePath = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        json_schema_extra=rules(
            rule(
                "self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
                "not an absolute path: begin with / and write it out without ..",
            )
        ),
    ),
]

RelativePath = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        json_schema_extra=rules(
            rule(
                "!self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
                "not a relative path: do not begin with / and write it out without ..",
            )
        ),
    ),
]
