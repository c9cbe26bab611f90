"""The program of a job and its pods: entrypoint, environment, resources, pod template."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .resource import FreeForm, Resource


class EntrypointSpec(Resource):
    """The program that every rank runs: exactly one of `script` and `module`."""

    cel_rules = (
        (
            "has(self.script) != has(self.module)",
            "entrypoint: give exactly one of script (a path in the image) and module (as for python -m)",
        ),
    )
    script: Annotated[str | None, Field(min_length=1, description="Path of a Python file in the image.")] = None
    module: Annotated[str | None, Field(min_length=1, description="Module to run, as for python -m.")] = None
    args: tuple[str, ...] = ()
    working_dir: str | None = None


class KeySelector(Resource):
    """A key of a ConfigMap or a Secret in the job's namespace."""

    name: str
    key: str
    optional: bool | None = None


class EnvVarSource(Resource):
    config_map_key_ref: KeySelector | None = None
    secret_key_ref: KeySelector | None = None


class EnvVar(Resource):
    """An environment variable of the ranks."""

    cel_rules = (
        (
            "!self.name.startsWith('SPOTTRAIN_') || self.name == 'SPOTTRAIN_AUDIT_DIR'",
            "env: names that begin with SPOTTRAIN_ are the operator's; choose another name",
        ),
    )
    name: Annotated[str, Field(min_length=1, max_length=256)]
    value: str | None = None
    value_from: EnvVarSource | None = None


class Resources(Resource):
    """Resources of one pod, as in a container. Without it: one nvidia.com/gpu per process."""

    requests: dict[str, str] = Field(default_factory=dict)
    limits: dict[str, str] = Field(default_factory=dict)


class Volume(Resource):
    """A volume: emptyDir, configMap, secret or persistentVolumeClaim. Nothing of the host."""

    name: str
    empty_dir: Annotated[FreeForm | None, Field(alias="emptyDir")] = None
    config_map: Annotated[FreeForm | None, Field(alias="configMap")] = None
    secret: FreeForm | None = None
    persistent_volume_claim: Annotated[FreeForm | None, Field(alias="persistentVolumeClaim")] = None


class VolumeMount(Resource):
    name: str
    mount_path: str
    read_only: bool | None = None
    sub_path: str | None = None


class Toleration(Resource):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None
    toleration_seconds: int | None = None


class PodTemplate(Resource):
    """What a job may say about its pods. Everything else is the operator's, so that pods stay restricted."""

    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    service_account_name: str | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: Annotated[tuple[dict[str, str], ...], Field(max_length=8)] = ()
    priority_class_name: str | None = None
    volumes: Annotated[tuple[Volume, ...], Field(max_length=32)] = ()
    volume_mounts: Annotated[tuple[VolumeMount, ...], Field(max_length=32)] = ()
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=3600)] = 120
