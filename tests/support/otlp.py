"""An OTLP receiver over gRPC that keeps what it gets, as messages."""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.message import Message
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_rpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces_rpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Attributes = dict[str, Any]


class Receiver:
    """Serves from the beginning on; `port` is on loopback."""

    def __init__(self) -> None:
        self._traces: list[traces_pb2.ExportTraceServiceRequest] = []
        self._metrics: list[metrics_pb2.ExportMetricsServiceRequest] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        traces_rpc.add_TraceServiceServicer_to_server(
            _Keeper(self._traces, traces_pb2.ExportTraceServiceResponse), self._server
        )
        metrics_rpc.add_MetricsServiceServicer_to_server(
            _Keeper(self._metrics, metrics_pb2.ExportMetricsServiceResponse), self._server
        )
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def spans(self) -> Iterator[tuple[Attributes, Span]]:
        """Each with what its process says of itself."""
        for request in self._traces:
            for resource in request.resource_spans:
                told = attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    yield from ((told, span) for span in scope.spans)

    def metrics(self) -> Iterator[tuple[Attributes, Metric]]:
        for request in self._metrics:
            for resource in request.resource_metrics:
                told = attributes(resource.resource.attributes)
                for scope in resource.scope_metrics:
                    yield from ((told, metric) for metric in scope.metrics)


class _Keeper:
    """Either service; both have one method of this name."""

    def __init__(self, kept: list[Any], answer: Callable[[], Message]) -> None:
        self._kept, self._answer = kept, answer

    def Export(self, request: Message, context: grpc.ServicerContext) -> Message:
        self._kept.append(request)
        return self._answer()


def attributes(pairs: Iterable[KeyValue]) -> Attributes:
    """As Python has them; of arrays the elements."""
    found: Attributes = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind) if kind else None
        if kind == "array_value":
            value = [getattr(item, item.WhichOneof("value")) for item in value.values]
        found[pair.key] = value
    return found
