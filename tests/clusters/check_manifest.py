"""Reads a JobSet manifest and writes its faults as JSON; runs in the environment of the clusters."""  # noqa: E501

from __future__ import annotations

import json
import sys
from typing import Any

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models
from pydantic import BaseModel, ValidationError


def unknown(given: Any, model: BaseModel, path: str = "") -> list[str]:
    """Fields that a model does not have; those below `template` are Kubernetes' own."""
    known = {field.alias or name: name for name, field in type(model).model_fields.items()}
    found = [f"{path}{key}: there is no such field" for key in given if key not in known]
    for key, value in given.items():
        inner = getattr(model, known[key], None) if key in known else None
        if isinstance(inner, BaseModel) and key not in ("metadata", "template"):
            found += unknown(value, inner, f"{path}{key}.")
        elif isinstance(inner, list):
            for number, (one, other) in enumerate(zip(value, inner, strict=True)):
                if isinstance(other, BaseModel):
                    found += unknown(one, other, f"{path}{key}.{number}.")
    return found


def main() -> None:
    """Check what comes on stdin."""
    manifest = yaml.safe_load(sys.stdin.read())
    faults: list[str] = []
    try:
        read = models.JobsetV1alpha2JobSet.from_dict(manifest)
        faults += unknown(manifest, read)
    except ValidationError as error:
        faults.append(str(error))
    for job in manifest["spec"].get("replicatedJobs", []):
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        try:
            kubernetes_validate.validate({**whole, **job["template"]}, "1.31", strict=True)
        except kubernetes_validate.ValidationError as error:
            faults.append(f"{job['name']}: {error}")
    if (manifest["apiVersion"], manifest["kind"]) != ("jobset.x-k8s.io/v1alpha2", "JobSet"):
        faults.append("this is no JobSet of v1alpha2")
    print(json.dumps({"faults": faults, "manifest": manifest}))


if __name__ == "__main__":
    main()
