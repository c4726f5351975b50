"""Reduced schemas of the custom resources that the chart writes: the fields it sets, and no others.

From the API references of KubeRay 1.5 to 1.7 (ray.io/v1) and of the Prometheus operator (monitoring.coreos.com/v1).
Pod templates are left to Kubernetes' own schemas.
"""

from typing import Any

TEXT = {"type": "string"}
BOOLEAN = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def of(*required: str, **properties: Any) -> dict[str, Any]:
    """An object with these fields at most, and at least the required ones."""
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


def resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    names = of("name", "labels", name=TEXT, labels=TEXTS)
    return of(
        *("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=names,
        spec=spec,
    )


SECRET_KEY = of("secretKeyRef", secretKeyRef=of("name", "key", name=TEXT, key=TEXT))
CREDENTIAL = of("valueFrom", valueFrom=SECRET_KEY)
TEMPLATE = {"type": "object"}

CLUSTER = of(
    *("rayVersion", "headGroupSpec", "workerGroupSpecs"),
    rayVersion=TEXT,
    authOptions=of("mode", mode={"enum": ["token", "disabled"]}, secretName=TEXT),
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions=of(version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=COUNT, securityContext={"type": "object"}),
    gcsFaultToleranceOptions=of(
        "redisAddress",
        redisAddress=TEXT,
        redisUsername=CREDENTIAL,
        redisPassword=CREDENTIAL,
        externalStorageNamespace=TEXT,
    ),
    headGroupSpec=of("rayStartParams", "template", rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs={
        "type": "array",
        "minItems": 1,
        "items": of(
            *("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=TEMPLATE,
        ),
    },
)

RULE = of("alert", "expr", "annotations", "labels", **{"for": TEXT}, alert=TEXT, expr=TEXT, annotations=TEXTS,
          labels=TEXTS)  # fmt: skip

CUSTOM_RESOURCES: dict[str, dict[str, Any]] = {
    "RayService": resource(
        "ray.io/v1",
        "RayService",
        of(
            *("serveConfigV2", "rayClusterConfig"),
            upgradeStrategy=of("type", type={"enum": ["NewCluster", "None"]}),
            serveConfigV2=TEXT,
            rayClusterConfig=CLUSTER,
        ),
    ),
    "RayJob": resource(
        "ray.io/v1",
        "RayJob",
        of(
            *("entrypoint", "rayClusterSpec"),
            submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
            entrypoint=TEXT,
            backoffLimit=COUNT,
            activeDeadlineSeconds={"type": "integer", "minimum": 1},
            shutdownAfterJobFinishes=BOOLEAN,
            ttlSecondsAfterFinished=COUNT,
            rayClusterSpec=CLUSTER,
        ),
    ),
    "PodMonitor": resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        of(
            *("selector", "podMetricsEndpoints"),
            selector=of("matchLabels", matchLabels=TEXTS),
            podMetricsEndpoints={
                "type": "array",
                "minItems": 1,
                "items": of("port", port=TEXT, path=TEXT, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}),
            },
        ),
    ),
    "PrometheusRule": resource(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        of(
            "groups",
            groups={"type": "array", "items": of("name", "rules", name=TEXT, rules={"type": "array", "items": RULE})},
        ),
    ),
}
