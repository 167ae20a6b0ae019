"""Metrics as text on a port of their own, for Prometheus. Needs an extra."""

from opentelemetry.sdk.metrics.export import MetricReader


class PrometheusText:
    """Args:
        host, port: where it is served; port 0: any free one.

    Attributes:
        port: where it is served.
        reader: collects at each request.

    Raises:
        OSError: the port cannot be had.
        ValueError: the packages are not there; names the fix.
    """

    reader: MetricReader

    def __init__(self, host: str, port: int) -> None:
        try:
            from opentelemetry.exporter.prometheus import PrometheusMetricReader
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError as error:
            raise ValueError(
                f"metrics_port: {error.name} is missing (fix: pip install "
                "'dsa-indexer[prometheus]')"
            ) from None
        # One of our own: in an engine's process the global one is the engine's.
        registry = CollectorRegistry()
        self._server, self._thread = start_http_server(port, host, registry)
        self.port = int(self._server.server_port)
        self.reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
