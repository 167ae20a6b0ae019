"""Plots of a load test, as SVG that stands inside a page."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure

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
            names = {"response": "from arrival", "step": "from its beginning"}
            if not result.is_open_loop:
                del names["response"]
            far = 10.0
            for (key, name), colour in zip(names.items(), (ORANGE, BLUE), strict=False):
                curve = [(1 / (1 - p / 100), value) for p, value in result.curve[key]]
                far = max([far, *(at for at, _ in curve)])
                axis.plot(*zip(*curve, strict=True), label=name, color=colour, linewidth=1.8)
            axis.set_xscale("log")
            shown = [p for p in (0.0, 50.0, 90.0, 99.0, 99.9, 99.99) if 1 / (1 - p / 100) <= far]
            axis.set_xticks([1 / (1 - p / 100) for p in shown], [f"{p:g} %" for p in shown])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_ylabel("step, ms")
            figure.legend(loc="outside upper right", ncols=2)
            return figure

    return _svg("percentiles", draw)


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

    def draw() -> Figure:
        with _figure(0.7 + 0.24 * len(chosen)) as (figure, (axis,)):
            places = range(len(chosen))
            axis.barh(places, [s.layer.p99 for s in chosen], color=ORANGE, height=0.3, label="p99")
            axis.barh(places, [s.layer.p50 for s in chosen], color=BLUE, height=0.7, label="p50")
            axis.set_yticks(places, [_label(shape) for shape in chosen])
            axis.invert_yaxis()
            axis.grid(True, axis="x")
            axis.grid(False, axis="y")
            axis.set_xlabel("one layer, ms")
            figure.legend(loc="outside upper right", ncols=2)
            return figure

    return _svg("shapes", draw)


def _label(shape: ShapeResult) -> str:
    return f"{shape.kind}, {shape.requests} req., {shape.context:,} tokens"


def resources(result: LoadResult) -> str:
    """What the processes held over time; "" if nobody looked."""
    if not result.samples:
        return ""

    def draw() -> Figure:
        wanted = (("memory_mib", "memory, MiB"), ("mappings", "mappings"), ("descriptors", "fds"))
        with _figure(4.4, rows=len(wanted)) as (figure, axes):
            for axis, (what, label) in zip(axes, wanted, strict=True):
                for process, samples in result.samples.items():
                    is_service = process == "service"
                    axis.plot(
                        [sample.seconds for sample in samples],
                        [getattr(sample, what) for sample in samples],
                        color=BLUE if is_service else GREY,
                        linewidth=1.6 if is_service else 0.8,
                        label=process if is_service else "_",
                    )
                axis.set_ylabel(label)
                axis.set_ylim(bottom=0)
            if len(result.samples) > 1:
                axes[0].plot([], [], color=GREY, linewidth=0.8, label="sessions")
            figure.legend(loc="outside upper right", ncols=2)
            axes[-1].set_xlabel("seconds")
            return figure

    return _svg("resources", draw)
