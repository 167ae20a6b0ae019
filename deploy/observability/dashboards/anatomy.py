"""Where does a step's time go, stage by stage?"""

from board import choice, dashboard, fixed_choice
from panels import bars, heatmap, lines, spans
from queries import Json, Query, quantile, quantiles, summed

from ipc_handoff.stages import STEP_SPAN

UID = "dsa-indexer-anatomy"
# As a layer goes through them, over both sides.
STAGES = {
    "dsa.stage": "worker",
    "dsa.gate": "service",
    "dsa.logits": "service",
    "dsa.topk": "service",
    "dsa.answer": "service",
    "dsa.handback": "worker",
    "dsa.attend": "worker",
}
_STAGE = "dsa_indexer_stage_seconds"
_STEP = "dsa_indexer_step_seconds"
_SHAPE = "span.dsa.step, span.dsa.rows, span.dsa.requests, span.dsa.context, span.dsa.placement"


def anatomy() -> Json:
    def every_stage(share: float) -> list[Query]:
        return [
            Query(quantile(share, _STAGE, f'stage="{stage}"'), f"{stage} ({side})", now=True)
            for stage, side in STAGES.items()
        ]

    order = (
        "From top to bottom as a layer goes through them. dsa.gate overlaps with the worker's "
        "staging; the worker waits while the service goes from gate to answer."
    )
    now = [
        bars("Median now", order, "s", every_stage(0.5), 12),
        bars("p99 now", order, "s", every_stage(0.99), 12),
    ]
    over_time = [
        lines(
            f"Stages, {name}",
            "A gate that grows: workers stage late. Logits and top-k: context, batch, or other "
            "work on the device. Hand-back: the worker's host or copy. Points lead to traces.",
            "s",
            [Query(quantile(share, _STAGE, by="stage"), "{{stage}}", exemplars=True)],
            width=12,
        )
        for name, share in (("median", 0.5), ("p99", 0.99))
    ]
    chosen = 'stage="$stage"'
    one = [
        heatmap(
            "Durations of $stage",
            "Two bands are two kinds of step, often decode and prefill. Points lead to traces.",
            _STAGE,
            chosen,
        ),
        lines(
            "$stage: median, p99 and mean",
            "A mean far above the median is a tail that is heavy.",
            "s",
            [
                *quantiles(_STAGE, chosen),
                Query(
                    f"{summed(f'{_STAGE}_sum', chosen)} / {summed(f'{_STAGE}_count', chosen)}",
                    "mean",
                ),
            ],
            width=12,
        ),
    ]
    shares = [
        lines(
            "Share of each stage",
            "Of the time of all stages of a layer, both sides. Waiting is no stage.",
            "percentunit",
            [Query(summed(f"{_STAGE}_sum", by="stage"), "{{stage}}")],
            width=12,
            stacked="percent",
        ),
        lines(
            "Layers that were timed",
            "One of a step; on a GPU of every 16th step. Fewer than steps: numbers above rest on "
            "little.",
            "ops",
            [Query(summed(f"{_STAGE}_count", by="stage"), "{{stage}}")],
            width=12,
        ),
    ]
    steps = [
        heatmap(
            "Steps, as services see them",
            "From the first gate passed to the last stamp.",
            _STEP,
            'side="service"',
        ),
        heatmap(
            "Steps, as workers see them",
            "With staging, waiting and attention.",
            _STEP,
            'side="worker"',
        ),
    ]
    found = [
        spans(
            "Steps that took longer than $slow",
            "Of those that are kept: by ratio, slow ones, and those in which something happened.",
            f'{{ span:name = "{STEP_SPAN}" && span:duration > $slow }} | select({_SHAPE})',
        ),
        spans(
            "Steps that were computed inline",
            "No service at all: placement inline, epoch 0.",
            '{ span.dsa.placement = "inline" }'
            " | select(span.dsa.step, span.dsa.rows, span.dsa.requests, span.dsa.context)",
        ),
        spans(
            "Stages that did not end",
            "Where a service or an engine stopped.",
            '{ span:name =~ "dsa[.].*" && span:status = error }'
            " | select(span.dsa.step, span.dsa.epoch, span.dsa.layer, span.dsa.status)",
        ),
        spans(
            "Stages that the worker told for its service",
            "The service was dead, or had been given up.",
            "{ span.dsa.incomplete = true }"
            " | select(span.dsa.step, span.dsa.epoch, span.dsa.layer)",
        ),
    ]
    stage = choice("stage", "Stage", f"label_values({_STAGE}_bucket, stage)", many=False)
    stage["current"] = {"text": "dsa.logits", "value": "dsa.logits"}
    return dashboard(
        UID,
        "dsa-indexer: step anatomy",
        "The stages of a layer over both processes, and the traces behind the numbers.",
        [
            ("The stages of a layer", now),
            ("Over time", over_time),
            ("One stage: $stage", one),
            ("Where the time goes", shares),
            ("Whole steps", steps),
            ("Steps to look at", found),
        ],
        [stage, fixed_choice("slow", "Slow step", ["100ms", "1ms", "10ms", "1s"])],
    )
