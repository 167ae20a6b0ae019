"""What several of these tests start from."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc_handoff import descriptors
from tests.ipc_handoff.descriptor_peers import Service
from tests.support.descriptors import no_descriptor_leaks
from tests.support.waiting import SOON


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    for bound in ("_HELLO_SECONDS", "_REPLY_SECONDS"):
        monkeypatch.setattr(descriptors, bound, SOON)
    with no_descriptor_leaks():
        service = Service(tmp_path)
        yield service
        service.server.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)
