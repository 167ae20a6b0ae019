"""Plots of a load test, as SVG that stands inside a page."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dsa_indexer_cli.load.resources import GpuSample
from dsa_indexer_cli.load.result import LoadResult, ShapeResult

# Told apart by people who see few colours, too (Okabe and Ito's).
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8a8f98"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    # Text stays text: smaller, and it can be searched.
    "svg.fonttype": "none",
}
_WIDTH = 7.6
_MOST_SHAPES = 18


@contextmanager
def _figure(height: float, rows: int = 1) -> Iterator[tuple[Figure, list[Any]]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
    yield figure, [row[0] for row in axes]


def _svg(name: str, draw: Callable[[], Figure]) -> str:
    """The drawn figure as an <svg> element."""
    # The salt keeps names inside one figure apart from those of the page's others.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        text = io.StringIO()
        # No date: the same numbers give the same page.
        draw().savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def percentiles(result: LoadResult) -> str:
    """Latency over the percentile, on the axis of HdrHistogram's plots."""

    def draw() -> Figure:
        with _figure(3.0) as (figure, (axis,)):
            lines = [("step", "from its beginning", BLUE)]
            if result.is_open_loop:
                lines.insert(0, ("response", "from arrival", ORANGE))
            far = 10.0
            for key, name, colour in lines:
                curve = [(1 / (1 - p / 100), value) for p, value in result.curve[key]]
                far = max([far, *(at for at, _ in curve)])
                axis.plot(*zip(*curve, strict=True), label=name, color=colour, linewidth=1.8)
            axis.set_xscale("log")
            _mark_limit(axis, result)
            shown = [p for p in (0.0, 50.0, 90.0, 99.0, 99.9, 99.99) if 1 / (1 - p / 100) <= far]
            axis.set_xticks([1 / (1 - p / 100) for p in shown], [f"{p:g} %" for p in shown])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_ylabel("step, ms")
            figure.legend(loc="outside upper right", ncols=2)
            return figure

    return _svg("percentiles", draw)


def _mark_limit(axis: Any, result: LoadResult) -> None:
    """Where the 99th percentile must stay, if that is a limit."""
    if (limit := result.workload.limits.step_p99_milliseconds) is not None:
        axis.axhline(limit, color=GREY, linewidth=1, linestyle="--")
        axis.annotate("limit of p99", (1, limit), xytext=(2, 3), textcoords="offset points",
                      fontsize=8, color=GREY)  # fmt: skip


def course(result: LoadResult) -> str:
    """Steps a second, and latency, over time."""

    def draw() -> Figure:
        with _figure(3.6, rows=2) as (figure, (rate, latency)):
            seconds = [point.seconds for point in result.points]
            rate.plot(seconds, [p.steps_a_second for p in result.points], color=GREEN)
            rate.set_ylim(bottom=0)
            rate.set_ylabel("steps/s")
            latency.plot(seconds, [p.p99 for p in result.points], color=ORANGE, label="p99")
            latency.plot(seconds, [p.p50 for p in result.points], color=BLUE, label="p50")
            latency.set_ylim(bottom=0)
            latency.set_ylabel("step, ms")
            latency.set_xlabel("seconds")
            figure.legend(loc="outside upper right", ncols=2)
            return figure

    return _svg("course", draw)


def shapes(result: LoadResult) -> str:
    """One layer's latency by kind, requests and context; the most frequent shapes."""
    frequent = sorted(result.shapes, key=lambda shape: -shape.steps)[:_MOST_SHAPES]
    chosen = [shape for shape in result.shapes if shape in frequent and shape.steps]
    of_layer = [layer_of(shape, len(result.geometry.layers)) for shape in chosen]
    factor, unit = _unit(max(p99 for _, p99 in of_layer))

    def draw() -> Figure:
        with _figure(0.7 + 0.24 * len(chosen)) as (figure, (axis,)):
            places = range(len(chosen))
            p50s, p99s = (
                [time * factor for time in times] for times in zip(*of_layer, strict=True)
            )
            axis.barh(places, p99s, color=ORANGE, height=0.3, label="p99")
            axis.barh(places, p50s, color=BLUE, height=0.7, label="p50")
            axis.set_yticks(places, [_label(shape) for shape in chosen])
            axis.invert_yaxis()
            axis.grid(True, axis="x")
            axis.grid(False, axis="y")
            axis.set_xlabel(f"one layer, {unit}")
            figure.legend(loc="outside upper right", ncols=2)
            return figure

    return _svg("shapes", draw)


def layer_of(shape: ShapeResult, layers: int) -> tuple[float, float]:
    """p50 and p99 of one layer, milliseconds: of layers where they were told apart, or of steps'
    means.
    """
    if shape.layer.count:
        return shape.layer.p50, shape.layer.p99
    return shape.forward.p50 / layers, shape.forward.p99 / layers


def _unit(most: float) -> tuple[float, str]:
    """What milliseconds are multiplied by on an axis that ends there, and its unit."""
    return (1.0, "ms") if most >= 1 else (1000.0, "µs")


def _label(shape: ShapeResult) -> str:
    return f"{shape.kind}, {shape.requests} req., {shape.context:,} tokens"


def resources(result: LoadResult) -> str:
    """What processes and GPUs held over time; "" if nobody looked."""
    if not result.samples:
        return ""
    wanted = {"memory_mib": "memory, MiB", "mappings": "mappings", "descriptors": "fds"}
    if any(isinstance(samples[0], GpuSample) for samples in result.samples.values()):
        wanted["gpu_memory_mib"] = "GPU, MiB"

    def draw() -> Figure:
        with _figure(1.47 * len(wanted), rows=len(wanted)) as (figure, axes):
            for axis, (what, label) in zip(axes, wanted.items(), strict=True):
                for process, samples in result.samples.items():
                    if hasattr(samples[0], what):
                        _draw_course(axis, process, samples, what)
                axis.set_ylabel(label)
                axis.set_ylim(bottom=0)
            handles = {
                label: handle
                for axis in axes
                for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
            }
            figure.legend(handles.values(), handles, loc="outside upper right", ncols=4)
            axes[-1].set_xlabel("seconds")
            return figure

    return _svg("resources", draw)


def _draw_course(axis: Any, process: str, samples: Any, what: str) -> None:
    is_session = process.startswith("session")
    axis.plot(
        [sample.seconds for sample in samples],
        [getattr(sample, what) for sample in samples],
        color=GREY if is_session else GREEN if what == "gpu_memory_mib" else BLUE,
        linewidth=0.8 if is_session else 1.6,
        label="sessions" if is_session else process,
    )
