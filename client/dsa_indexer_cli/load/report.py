"""A load test as one HTML page that needs nothing besides itself."""

from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from dsa_indexer_cli.load import plots
from dsa_indexer_cli.load.durations import duration
from dsa_indexer_cli.load.result import LoadResult


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
        settings=result.workload.model_dump(mode="json", exclude_none=True),
        plots={
            "percentiles": plots.percentiles(result) if result.steps else "",
            "course": plots.course(result) if result.points else "",
            "shapes": plots.shapes(result) if result.steps else "",
            "resources": plots.resources(result),
        },
    )
