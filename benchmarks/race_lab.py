"""The long run of `dsa-indexer racelab`, kept as a results file.

    python benchmarks/race_lab.py [--provocations N] [--clean-steps N]

Ends with status 1 if a race was missed or a clean step raised an alarm.
"""

from dataclasses import asdict
from typing import Annotated

import typer
from results_file import processor, write

from dsa_indexer_cli.racelab.run import run_lab


def main(
    provocations: Annotated[int, typer.Option(min=1, help="Of each race.")] = 1_000,
    clean_steps: Annotated[int, typer.Option(min=0, help="In all.")] = 100_000,
) -> None:
    """Run the lab, write benchmarks/results."""
    result = run_lab(provocations, clean_steps, lambda doing: None)
    print(f"written to {write('cpu-race_lab', processor(), {**asdict(result), 'ok': result.ok})}")
    raise typer.Exit(0 if result.ok else 1)


if __name__ == "__main__":
    typer.run(main)
