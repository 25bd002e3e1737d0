"""PURE. What the chart hands to Kubernetes as it was given, for what it has no value of its own: environment, volumes,
annotations, and parts of the pod template. What the chart derives cannot be given here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from replica.config import FrozenModel

_Text = dict[str, str]
#: of the pod template's spec: what nothing else in the chart says, and no stream depends on. Their content is checked
#: by `shoal k8s check` and by the API server.
SPEC_KEYS = {
    "affinity": "object",
    "dnsConfig": "object",
    "dnsPolicy": "string",
    "hostAliases": "array",
    "initContainers": "array",
    "priorityClassName": "string",
    "readinessGates": "array",
    "schedulerName": "string",
    "serviceAccountName": "string",
    "topologySpreadConstraints": "array",
}


class Toleration(FrozenModel):
    """As in Kubernetes."""

    key: str | None = Field(None, description="Of the taint; none: any.")
    operator: Literal["Equal", "Exists"] | None = Field(None, description="None: Equal.")
    value: str | None = Field(None, description="Of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(None, description="None: all.")
    tolerationSeconds: int | None = Field(None, ge=0, description="With NoExecute: how long.")


class NamedSource(FrozenModel):
    """A ConfigMap or Secret."""

    name: str = Field(min_length=1, max_length=253, description="Of one that is there.")
    optional: bool = Field(False, description="Start without it.")


class EnvFrom(FrozenModel):
    """All keys of an existing object as environment."""

    prefix: str | None = Field(None, description="Before each name.")
    configMapRef: NamedSource | None = None
    secretRef: NamedSource | None = None

    @model_validator(mode="after")
    def _one(self) -> EnvFrom:
        if (self.configMapRef is None) == (self.secretRef is None):
            raise ValueError("needs configMapRef or secretRef, and one of them only")
        return self


class ConfigMapVolume(FrozenModel):
    """Files of a ConfigMap."""

    name: str = Field(min_length=1, max_length=253, description="Of one that is there.")
    optional: bool = Field(False, description="Start without it.")
    defaultMode: int | None = Field(None, ge=0, le=511, description="Of files, as a decimal number.")


class SecretVolume(FrozenModel):
    """Files of a Secret."""

    secretName: str = Field(min_length=1, max_length=253, description="Of one that is there.")
    optional: bool = Field(False, description="Start without it.")
    defaultMode: int | None = Field(None, ge=0, le=511, description="Of files, as a decimal number.")


class ClaimVolume(FrozenModel):
    """A claim that is there."""

    claimName: str = Field(min_length=1, max_length=253, description="Its name.")
    readOnly: bool = Field(False, description="For all mounts.")


class EmptyVolume(FrozenModel):
    """Gone with the pod."""

    medium: Literal["", "Memory"] | None = Field(None, description="Memory counts as memory of the pod.")
    sizeLimit: str | None = Field(None, description="As 10Gi.")


class HostVolume(FrozenModel):
    """A folder of the node, for example its NVMe disk."""

    path: str = Field(pattern="^/", description="On the node.")
    type: Literal["", "Directory", "DirectoryOrCreate"] | None = Field(None, description="As in Kubernetes.")


class Volume(FrozenModel):
    """A name and one source."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63, description="Not shm, ray, models.")
    configMap: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    persistentVolumeClaim: ClaimVolume | None = None
    emptyDir: EmptyVolume | None = None
    hostPath: HostVolume | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Volume:
        sources = [name for name in type(self).model_fields if name != "name" and getattr(self, name) is not None]
        if len(sources) != 1:
            raise ValueError(f"the volume {self.name!r} needs one source, and has {', '.join(sources) or 'none'}")
        return self


class VolumeMount(FrozenModel):
    """Where a volume is seen."""

    name: str = Field(min_length=1, description="Of a volume.")
    mountPath: str = Field(pattern="^/", description="In the container.")
    subPath: str | None = Field(None, description="Of the volume.")
    readOnly: bool = Field(False, description="For this mount.")


def _checked(template: dict[str, Any]) -> dict[str, Any]:
    allowed = {"metadata": {"annotations", "labels"}, "spec": set(SPEC_KEYS)}
    for part, content in template.items():
        if part not in allowed:
            raise ValueError(f"{part!r} is no part of it; allowed: {', '.join(allowed)}")
        for key in content if isinstance(content, dict) else [content]:
            if key not in allowed[part]:
                raise ValueError(f"{part} has no {key!r}; allowed: {', '.join(sorted(allowed[part]))}")
    return template


#: merged over the pod template that the chart makes
PodTemplate = Annotated[dict[str, Any], AfterValidator(_checked)]


class HatchValues(FrozenModel):
    """Of each kind of pod. A change of any of them makes a new cluster."""

    nodeSelector: _Text = Field({}, description="As in Kubernetes.")
    tolerations: tuple[Toleration, ...] = Field((), description="More than the one for GPU nodes.")
    env: _Text = Field({}, description="More environment.")
    envFrom: tuple[EnvFrom, ...] = Field((), description="More environment, from what is there.")
    volumes: tuple[Volume, ...] = Field((), description="More volumes.")
    volumeMounts: tuple[VolumeMount, ...] = Field((), description="Of these, in Ray's container.")
    annotations: _Text = Field({}, description="Of the pods.")
    podTemplate: PodTemplate = Field({}, description="Laid over the pod template: metadata and parts of spec.")


def template_schema() -> dict[str, Any]:
    """Of `podTemplate`, for `values.schema.json`."""
    text = {"type": "object", "additionalProperties": {"type": "string"}}

    def part(properties: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": False, "properties": properties}

    spec = {key: {"type": kind} for key, kind in SPEC_KEYS.items()}
    made = part({"metadata": part({"annotations": text, "labels": text}), "spec": part(spec)})
    return {"description": "What the chart derives cannot be given here.", **made}
