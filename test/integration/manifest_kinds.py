"""The kinds of manifests of which no package has the schema: what ours say of them, and no more."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


def kind(**fields: Any) -> type:
    """What has these fields and no other; a default stands behind a field's type."""
    return msgspec.defstruct(
        "Kind",
        [(name, *one) if isinstance(one, tuple) else (name, one) for name, one in fields.items()],
        forbid_unknown_fields=True,
        kw_only=True,
    )


def at_most(number: int, of: Any) -> Any:
    return Annotated[list[of], msgspec.Meta(min_length=1, max_length=number)]


TEXTS = list[str], []
LABELS = dict[str, str]
NAMED = kind(name=str, files=list[str], options=(dict[str, bool], {}))
IMAGE = kind(name=str, newName=str, newTag=str)
PATCH = kind(target=kind(kind=str, name=str), patch=str)
Kustomization = kind(
    apiVersion=str,
    kind=str,
    resources=TEXTS,
    components=TEXTS,
    namespace=(str, ""),
    configMapGenerator=(list[NAMED], []),
    images=(list[IMAGE], []),
    patches=(list[PATCH], []),
)

METADATA = kind(name=str, labels=LABELS)
EXPRESSION = kind(key=str, operator=str, values=list[str])
MONITOR_SPEC = kind(
    selector=kind(matchLabels=LABELS, matchExpressions=(list[EXPRESSION], [])),
    endpoints=list[kind(port=str, interval=str, path=(str, "/metrics"))],
    targetLabels=TEXTS,
    jobLabel=(str, ""),
)

PORT = kind(number=Annotated[int, msgspec.Meta(ge=1, le=65535)])
PICKER = kind(
    name=str,
    port=PORT,  # required of a Service, which it is
    failureMode=(Literal["FailOpen", "FailClose"], "FailClose"),
)
POOL_SPEC = kind(
    selector=kind(matchLabels=LABELS), targetPorts=at_most(8, PORT), endpointPickerRef=PICKER
)

PATH = kind(type=Literal["Exact", "PathPrefix", "RegularExpression"], value=str)
REMOVED = kind(remove=at_most(16, str))
FILTER = kind(type=Literal["RequestHeaderModifier"], requestHeaderModifier=REMOVED)
TIME = Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")]
RULE = kind(
    matches=list[kind(path=PATH)],
    filters=list[FILTER],
    backendRefs=list[kind(group=str, kind=str, name=str)],
    timeouts=kind(request=TIME),
)
ROUTE_SPEC = kind(parentRefs=list[kind(name=str, namespace=str)], rules=list[RULE])


def resource(spec: type, api: Any = str) -> type:
    return kind(apiVersion=api, kind=str, metadata=METADATA, spec=spec)


OWN = {
    "Kustomization": Kustomization,
    "Component": Kustomization,
    "ServiceMonitor": resource(MONITOR_SPEC),
    "InferencePool": resource(POOL_SPEC, Literal["inference.networking.k8s.io/v1"]),
    "HTTPRoute": resource(ROUTE_SPEC, Literal["gateway.networking.k8s.io/v1"]),
}
