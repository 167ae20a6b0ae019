"""Writes grafana/dashboards/*.json: `make dashboards`. What is written is committed."""

import json
from pathlib import Path

from anatomy import anatomy
from overview import overview
from races import races

FOLDER = Path(__file__).resolve().parents[1] / "grafana" / "dashboards"
DASHBOARDS = {"overview": overview, "anatomy": anatomy, "races": races}


def build(folder: Path) -> None:
    """Write each dashboard into `folder`."""
    for name, made in DASHBOARDS.items():
        content = json.dumps(made(), indent=2, ensure_ascii=False)
        (folder / f"{name}.json").write_text(f"{content}\n")


if __name__ == "__main__":
    build(FOLDER)
