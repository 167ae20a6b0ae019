"""From what the processes said to what the test found."""

from dsa_indexer_cli.load.collector import Collector, ShapeKey, ShapeTimes
from dsa_indexer_cli.load.histograms import Histogram
from dsa_indexer_cli.load.messages import added
from dsa_indexer_cli.load.resources import growth
from dsa_indexer_cli.load.result import LoadResult, PointResult, Service, ShapeResult, judge
from dsa_indexer_cli.load.run import Finished
from dsa_indexer_cli.load.workload import Workload

_NANOSECONDS = 1_000_000_000
# Equally far apart on a logarithmic axis of 1 / (1 - percentile): ten a decade, up to 99.999 %.
_CURVE = tuple(100 * (1 - 10 ** (-place / 10)) for place in range(51))


def summarise(workload: Workload, finished: Finished) -> LoadResult:
    """The result, judged by the workload's limits."""
    collector, dones = finished.collector, finished.dones
    seconds = (collector.last - collector.begin) / _NANOSECONDS
    # In a closed loop a session that compares an answer asks nothing.
    paused = sum(done.paused_seconds for done in dones) / len(dones) if dones else 0.0
    asking = max(seconds - (paused if workload.load.mode == "closed" else 0.0), 1e-9)
    response, step, layer = collector.response, collector.step, collector.layer
    result = LoadResult(
        workload=workload,
        geometry=finished.geometry,
        service=_service(finished),
        seconds=seconds,
        steps=collector.steps,
        rows=collector.rows,
        layers=collector.layers,
        inline_layers=collector.inline_layers,
        unserved_steps=collector.unserved,
        steps_a_second=collector.steps / asking,
        rows_a_second=collector.rows / asking,
        response=response.times(encoded=True),
        step=step.times(encoded=True),
        layer=layer.times(encoded=True),
        forward=collector.forward.times(encoded=True),
        shapes=[_shape(key, times) for key, times in sorted(collector.shapes.items())],
        points=_points(collector, workload.load.seconds),
        samples=finished.samples,
        curve={"response": _curve(response), "step": _curve(step)},
        failures=finished.failures,
        **added(dones),
    )
    if workload.soak is not None:
        for process, samples in finished.samples.items():
            result.growths += growth(process, samples, workload.soak)
    result.verdicts = judge(result)
    return result


def _shape(key: ShapeKey, times: ShapeTimes) -> ShapeResult:
    return ShapeResult(
        key.kind.name.lower(),
        key.requests,
        key.context,
        times.step.count,
        times.rows,
        times.response.times(),
        times.step.times(),
        times.layer.times(),
        times.forward.times(),
    )


def _service(finished: Finished) -> Service:
    status, opened = finished.host.status, finished.opened
    return Service(
        finished.host.address,
        status.version,
        status.pid,
        status.configuration.engine,
        opened.reasons,
        opened.placement,
        finished.host.gpu,
    )


def _points(collector: Collector, seconds: float) -> list[PointResult]:
    """Of the time in which steps were to begin: what ended later filled no whole one."""
    width = collector.point_seconds
    return [
        PointResult(
            (number + 0.5) * width,
            point.steps / width,
            point.response.percentile(50.0),
            point.response.percentile(99.0),
        )
        for number, point in sorted(collector.points.items())
        if number * width < seconds
    ]


def _curve(histogram: Histogram) -> list[tuple[float, float]]:
    """As far out as there are values for it."""
    known = [p for p in _CURVE if histogram.count * (1 - p / 100) >= 1]
    return [(round(p, 5), histogram.percentile(p)) for p in known]
