"""What a gate's process runs: a module, in the source as it is or with something changed."""

import shutil
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("attention_worker", "client", "indexer_service", "ipc_handoff", "proto", "tests")


@dataclass(frozen=True)
class Change:
    """What is put in the place of a text.

    Attributes:
        files: a pattern of paths in the tree.
        times: how often the text stands there; None: six times or more.
    """

    files: str
    there: str
    instead: str
    times: int | None = 1


@dataclass(frozen=True)
class Job:
    """`python -m module arguments`, with the source changed."""

    module: str
    arguments: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    def tree(self, repository: Path, folder: Path) -> Path:
        """Where it runs: the repository, or a changed copy in `folder`."""
        if not self.changes:
            return repository
        changed = {change.files.split("/")[0] for change in self.changes}
        for package in PACKAGES:
            if package in changed:
                shutil.copytree(repository / package, folder / package)
            else:
                (folder / package).symlink_to(repository / package)
        for change in self.changes:
            _put(change, folder)
        return folder


def _put(change: Change, folder: Path) -> None:
    found = 0
    for path in folder.glob(change.files):
        text = path.read_text()
        found += text.count(change.there)
        path.write_text(text.replace(change.there, change.instead))
    assert found >= 6 if change.times is None else found == change.times, (change, found)
