"""The kinds of manifests of which no package has the schema: what ours say of them, and no more."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["OWN", "Kustomization"]


class Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    files: list[str]


class Image(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    newName: str  # noqa: N815 - kustomize's names
    newTag: str  # noqa: N815


class Target(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    name: str


class Patch(msgspec.Struct, forbid_unknown_fields=True):
    target: Target
    patch: str


class Kustomization(msgspec.Struct, forbid_unknown_fields=True):
    apiVersion: str  # noqa: N815
    kind: str
    resources: list[str] = []
    components: list[str] = []
    namespace: str = ""
    configMapGenerator: list[Named] = []  # noqa: N815
    images: list[Image] = []
    patches: list[Patch] = []


class Expression(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    operator: str
    values: list[str]


class Selector(msgspec.Struct, forbid_unknown_fields=True):
    matchLabels: dict[str, str]  # noqa: N815
    matchExpressions: list[Expression] = []  # noqa: N815


class Endpoint(msgspec.Struct, forbid_unknown_fields=True):
    port: str
    interval: str
    path: str = "/metrics"


class MonitorSpec(msgspec.Struct, forbid_unknown_fields=True):
    selector: Selector
    endpoints: list[Endpoint]
    targetLabels: list[str] = []  # noqa: N815
    jobLabel: str = ""  # noqa: N815


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    labels: dict[str, str]


class Monitor(msgspec.Struct, forbid_unknown_fields=True):
    apiVersion: str  # noqa: N815
    kind: str
    metadata: Metadata
    spec: MonitorSpec


class Port(msgspec.Struct, forbid_unknown_fields=True):
    number: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class PickerRef(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    port: Port  # required of a Service, which it is
    failureMode: Literal["FailOpen", "FailClose"] = "FailClose"  # noqa: N815


class Labels(msgspec.Struct, forbid_unknown_fields=True):
    matchLabels: dict[str, str]  # noqa: N815


class PoolSpec(msgspec.Struct, forbid_unknown_fields=True):
    selector: Labels
    targetPorts: Annotated[list[Port], msgspec.Meta(min_length=1, max_length=8)]  # noqa: N815
    endpointPickerRef: PickerRef  # noqa: N815


class Pool(msgspec.Struct, forbid_unknown_fields=True):
    apiVersion: Literal["inference.networking.k8s.io/v1"]  # noqa: N815
    kind: str
    metadata: Metadata
    spec: PoolSpec


class Parent(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    namespace: str


class Path(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["Exact", "PathPrefix", "RegularExpression"]
    value: str


class Match(msgspec.Struct, forbid_unknown_fields=True):
    path: Path


class Backend(msgspec.Struct, forbid_unknown_fields=True):
    group: str
    kind: str
    name: str


class Removed(msgspec.Struct, forbid_unknown_fields=True):
    remove: Annotated[list[str], msgspec.Meta(max_length=16)]


class Filter(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["RequestHeaderModifier"]
    requestHeaderModifier: Removed  # noqa: N815


class Timeouts(msgspec.Struct, forbid_unknown_fields=True):
    request: Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")]


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    matches: list[Match]
    filters: list[Filter]
    backendRefs: list[Backend]  # noqa: N815
    timeouts: Timeouts


class RouteSpec(msgspec.Struct, forbid_unknown_fields=True):
    parentRefs: list[Parent]  # noqa: N815
    rules: list[Rule]


class Route(msgspec.Struct, forbid_unknown_fields=True):
    apiVersion: Literal["gateway.networking.k8s.io/v1"]  # noqa: N815
    kind: str
    metadata: Metadata
    spec: RouteSpec


OWN = {
    "Kustomization": Kustomization,
    "Component": Kustomization,
    "ServiceMonitor": Monitor,
    "InferencePool": Pool,
    "HTTPRoute": Route,
}
