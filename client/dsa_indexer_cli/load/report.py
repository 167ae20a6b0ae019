"""A load test as one HTML page that needs nothing besides itself."""

import math
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from dsa_indexer_cli.load import plots
from dsa_indexer_cli.load.durations import duration
from dsa_indexer_cli.load.plots import layer_of
from dsa_indexer_cli.load.result import LoadResult
from dsa_indexer_cli.load.steps import Kind

_FAINTEST, _DARKER = 0.08, 0.42
_LEAST = 1e-6


@dataclass(frozen=True)
class Cell:
    """One layer's median of decode steps, and how dark the cell is: 0 to 1."""

    milliseconds: float
    shade: float


def grid(result: LoadResult) -> dict[int, dict[int, Cell]]:
    """One layer of decode steps: by requests, then by context; {} if that is no table."""
    layers = len(result.geometry.layers)
    found = {
        (shape.requests, shape.context): layer_of(shape, layers)[0]
        for shape in result.shapes
        if shape.kind == Kind.DECODE.name.lower() and shape.steps
    }
    requests, contexts = ({key[place] for key in found} for place in (0, 1))
    if len(requests) < 2 or len(contexts) < 2:
        return {}
    logs = {key: math.log(max(ms, _LEAST)) for key, ms in found.items()}
    low, width = min(logs.values()), max(logs.values()) - min(logs.values())
    cells = {
        key: Cell(found[key], _FAINTEST + _DARKER * (log - low) / (width or 1.0))
        for key, log in logs.items()
    }
    return {
        row: {at: cells[row, at] for at in sorted(contexts) if (row, at) in cells}
        for row in sorted(requests)
    }


def page(result: LoadResult) -> str:
    """The whole page."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["duration"] = duration
    template = files("dsa_indexer_cli.load") / "templates" / "report.html"
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        result=result,
        load=result.workload.load,
        geometry=result.geometry,
        service=result.service,
        grid=(cells := grid(result)),
        contexts=sorted({context for row in cells.values() for context in row}),
        settings=result.workload.model_dump(mode="json", exclude_none=True),
        plots={
            "percentiles": plots.percentiles(result) if result.steps else "",
            "course": plots.course(result) if result.points else "",
            "shapes": plots.shapes(result) if result.steps else "",
            "resources": plots.resources(result),
        },
    )
