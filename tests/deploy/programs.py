"""Every program that a file in deploy/ starts: what it runs, in which environment, how it is asked.

Compose files, Kubernetes manifests, systemd units and the image, in one form.
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = FOLDER / "docker" / "compose.yaml"
DOCKERFILE = FOLDER / "docker" / "Dockerfile"
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
UNITS = sorted((FOLDER / "systemd").glob("*.service"))

_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_SPECIFIERS = {"%i": "0", "%t": "/run", "%C": "/var/cache"}
_INSTALLED = "/opt/dsa-indexer/bin/"


@dataclass
class Program:
    """One container or unit.

    Attributes:
        where: file and name, for people.
        command: with what the image stands for; empty: the image's own.
        mounts: paths that it shares with others.
        definition: as the file has it.
    """

    where: str
    command: list[str]
    environment: dict[str, str]
    probes: list[list[str]] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    definition: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.where

    @property
    def is_service(self) -> bool:
        return self.command[:2] == ["dsa-indexer", "serve"]


def programs() -> list[Program]:
    """All of them."""
    found = [*compose_programs(), image_program(), *(unit_program(unit) for unit in UNITS)]
    for manifest in MANIFESTS:
        found += manifest_programs(manifest)
    return found


def compose() -> dict[str, Any]:
    """The compose file, with its variables' defaults in place."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text())
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def compose_programs() -> list[Program]:
    image = image_program()
    found = []
    for name, service in compose()["services"].items():
        of_image = "entrypoint" not in service and service["image"] == "dsa-indexer"
        entrypoint = service.get("entrypoint", image.command[:1] if of_image else [])
        check = service.get("healthcheck", {}).get("test", [])
        found.append(
            Program(
                f"{COMPOSE.name}: {name}",
                [*entrypoint, *service.get("command", [])],
                {key: str(value) for key, value in service["environment"].items()},
                [check[1:]] if check else [],
                [volume.split(":")[1] for volume in service["volumes"]],
                service,
            )
        )
    return found


def manifests(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    """The pod's specification in a Pod or in what makes pods."""
    spec = document.get("spec", {})
    return spec if document["kind"] == "Pod" else spec.get("template", {}).get("spec")


def manifest_programs(path: Path) -> list[Program]:
    found = []
    for document in manifests(path):
        pod = pod_of(document) or {}
        for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
            of_image = container["image"].startswith("dsa-indexer:")
            default = ["dsa-indexer"] if of_image else []
            found.append(
                Program(
                    f"{path.name}: {container['name']}",
                    [*container.get("command", default), *container.get("args", [])],
                    {entry["name"]: entry["value"] for entry in container.get("env", [])},
                    [
                        container[probe]["exec"]["command"]
                        for probe in _PROBES
                        if _runs(container, probe)
                    ],
                    [mount["mountPath"] for mount in container.get("volumeMounts", [])],
                    container,
                )
            )
    return found


def _runs(container: dict[str, Any], probe: str) -> bool:
    return "exec" in container.get(probe, {})


def image_program() -> Program:
    """What the image does by itself."""
    instructions = dockerfile()
    environment = dict(
        pair.split("=", 1) for key, value in instructions if key == "ENV" for pair in value.split()
    )
    last = {key: value for key, value in instructions}
    probe = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    command = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    return Program(DOCKERFILE.name, command, environment, [probe])


def dockerfile() -> list[tuple[str, str]]:
    """Instruction and the rest of it, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (key, value)
        for key, _, value in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def unit_entries(path: Path) -> list[tuple[str, str]]:
    """Keys and values of a unit, for its instance 0."""
    found = []
    for line in path.read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            for specifier, meaning in _SPECIFIERS.items():
                value = value.replace(specifier, meaning)
            found.append((key, value))
    return found


def unit_program(path: Path) -> Program:
    entries = unit_entries(path)
    values = dict(entries)
    return Program(
        path.name,
        _command(values["ExecStart"]),
        dict(value.split("=", 1) for key, value in entries if key == "Environment"),
        [_command(value) for key, value in entries if key == "ExecStartPost"],
        definition=values,
    )


def _command(line: str) -> list[str]:
    return shlex.split(line.removeprefix(_INSTALLED))
