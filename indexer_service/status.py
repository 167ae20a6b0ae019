"""What GetStatus tells."""

import os
import time
from importlib.metadata import PackageNotFoundError, version

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.agreement import configuration_message
from indexer_service.devices import ServiceDevice
from indexer_service.kernels.configuration import Configuration
from indexer_service.session_table import SessionTable


def service_version() -> str:
    """Version of the installed distribution; "unknown" in a tree that is not installed."""
    try:
        return version("dsa-indexer")
    except PackageNotFoundError:
        return "unknown"


class StatusReporter:
    """Args:
    configuration: what an automatic session gets.
    device: that the service computes on.
    """

    def __init__(
        self, table: SessionTable, configuration: Configuration, device: ServiceDevice
    ) -> None:
        self._table = table
        self._device = device
        self._configuration = configuration_message(configuration)
        self._started = time.monotonic()
        self.version = service_version()

    def status(self) -> pb.GetStatusResponse:
        """The service as it is now."""
        return pb.GetStatusResponse(
            version=self.version,
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - self._started,
            gpu_uuid=self._device.gpu_uuid,
            configuration=self._configuration,
            sessions=[session.status() for session in self._table.sessions],
            mapped_bytes=self._table.mapped_bytes,
            serving=self._table.refusal is None,
        )
