"""What several of these tests start from."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ipc_handoff.descriptor_peers import (
    Service,
)
from tests.ipc_handoff.support import no_descriptor_leaks


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
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
