"""What documents point to is there, and their tables name every setting with its default."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from pydantic_settings import BaseSettings

from attention_worker.plugin.settings import PluginSettings
from indexer_client.settings import ClientSettings
from indexer_service.settings import Settings

# Defaults that documents describe rather than name.
DESCRIBED = {"address"}


def documents(tree: Path) -> list[Path]:
    return [path for folder in ("docs", "deploy") for path in (tree / folder).rglob("*.md")] + [
        *tree.glob("*.md")
    ]


def dead_ends(tree: Path) -> list[str]:
    """Links, pictures and results files that are not there."""
    found = []
    for path in documents(tree):
        text = path.read_text()
        links = [(path.parent, link) for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text)]
        links += [(tree, name) for name in re.findall(r"benchmarks/results/[\w.-]+\.json", text)]
        for folder, link in links:
            if "://" not in link and not (folder / link).exists():
                found.append(f"{path.relative_to(tree)}: {link}")
    return found


def defaults(document: Path) -> dict[str, str]:
    """By setting, from the tables of a document: `a`, `b` | 1, none | ... is two settings."""
    found = {}
    for line in document.read_text().splitlines():
        if line.startswith("| `"):
            names, default, *_ = line.strip("| ").split(" | ")
            settings, values = re.findall(r"`([^`]+)`", names), default.split(", ")
            found |= zip(settings, values * len(settings), strict=False)
    return found


def written(value: Any) -> str:
    """A default as the tables write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, ByteSize):
        return value.human_readable(separator=" ").replace(".0", "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_nothing_leads_nowhere(repository: Path) -> None:
    assert not dead_ends(repository)


def test_a_dead_end_is_seen(tmp_path: Path) -> None:
    text = "[a](b.md#c) ![d](e.png) [f](https://g) `benchmarks/results/h.json` [README](README.md)"
    (tmp_path / "README.md").write_text(text)
    assert dead_ends(tmp_path) == [
        "README.md: b.md",
        "README.md: e.png",
        "README.md: benchmarks/results/h.json",
    ]


@pytest.mark.parametrize(
    ("document", "settings", "prefix"),
    [
        ("service.md", Settings, ""),
        ("client.md", ClientSettings, ""),
        ("vllm.md", PluginSettings, "DSA_INDEXER_"),
    ],
)
def test_every_setting_is_there_with_its_default(
    document: str, settings: type[BaseSettings], prefix: str, repository: Path
) -> None:
    told = defaults(repository / "docs" / document)
    for name, field in settings.model_fields.items():
        default = told[f"{prefix}{name.upper()}" if prefix else name].strip("`")
        if name not in DESCRIBED:
            assert default == written(field.get_default(call_default_factory=True)), name
