"""The manifests: valid for Kubernetes, confined, and with what worker and service share."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.programs import MANIFESTS, manifest_programs, manifests, pod_of

VERSIONS = ("1.34.0", "1.37.0")
DOCUMENTS = [(path, document) for path in MANIFESTS for document in manifests(path)]
PODS = [(path, pod) for path, document in DOCUMENTS if (pod := pod_of(document))]
_NAMES = [f"{path.name}: {document['kind']}" for path, document in DOCUMENTS]


def complaint(document: dict[str, Any], version: str) -> str:
    """What is wrong with it, "" if nothing."""
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("path", "document"), DOCUMENTS, ids=_NAMES)
def test_a_manifest_is_valid(path: Path, document: dict[str, Any], version: str) -> None:
    assert not complaint(document, version)


def test_a_misspelt_key_is_seen() -> None:
    (pod,) = [d for _, d in DOCUMENTS if d["kind"] == "Pod"]
    planted = {**pod, "spec": {**pod["spec"], "shareProcesNamespace": True}}
    assert "shareProcesNamespace" in complaint(planted, VERSIONS[-1])


def _pod(name: str) -> dict[str, Any]:
    (pod,) = [pod for path, pod in PODS if path.name == name]
    return pod


def test_the_sidecar_shares_processes_memory_and_the_gpu() -> None:
    pod = _pod("sidecar.yaml")
    assert pod["shareProcessNamespace"] is True
    assert not pod.get("hostPID") and not pod.get("hostIPC")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert not any("hostPath" in volume for volume in volumes.values())
    (claim,) = pod["resourceClaims"]
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["resources"]["claims"] == [{"name": claim["name"]}]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_sidecars_are_there_before_the_worker() -> None:
    mps, indexer = _pod("sidecar.yaml")["initContainers"]
    assert (mps["name"], indexer["name"]) == ("mps", "indexer")
    assert mps["restartPolicy"] == indexer["restartPolicy"] == "Always"
    assert "startupProbe" in mps and "startupProbe" in indexer


def test_the_daemonset_asks_for_no_gpu_and_shares_the_hosts_namespaces() -> None:
    pod = _pod("daemonset.yaml")
    assert pod["hostPID"] is True and pod["hostIPC"] is True
    for container in pod["containers"]:
        assert "nvidia.com/gpu" not in container["resources"].get("limits", {})
        assert "claims" not in container["resources"]
    paths = {v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    assert {"/dev/shm", "/run/dsa-indexer", "/run/nvidia-mps"} <= paths


def test_the_daemonset_has_one_service_a_gpu() -> None:
    containers = _pod("daemonset.yaml")["containers"]
    for number, container in enumerate(containers):
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        assert container["name"] == f"gpu{number}"
        assert container["args"] == ["serve", "--device", f"cuda:{number}"]
        assert f"/{number}/" in environment["DSA_INDEXER_ADDRESS"]
    first, *others = [_without_number(container) for container in containers]
    assert all(other == first for other in others)


def _without_number(container: dict[str, Any]) -> dict[str, Any]:
    return {
        **container,
        "name": "",
        "args": [],
        "env": [entry for entry in container["env"] if entry["name"] != "DSA_INDEXER_ADDRESS"],
    }


@pytest.mark.parametrize(("path", "pod"), PODS, ids=[path.name for path, _ in PODS])
def test_containers_are_confined(path: Path, pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for program in manifest_programs(path):
        context = program.definition["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert not context.get("privileged")
        # Root only where a directory of the host's is made for the others.
        assert ("runAsUser" in context) == program.where.endswith(": directories")


def test_every_service_has_all_three_probes() -> None:
    for path in MANIFESTS:
        for program in manifest_programs(path):
            if program.is_service:
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(
                    program.definition
                )
                assert program.definition["livenessProbe"]["exec"]["command"][-1] == "--live"
                assert program.definition["readinessProbe"]["exec"]["command"][-1] != "--live"
