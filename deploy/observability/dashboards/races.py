"""What raced, in which step, and what came of it?"""

from board import choice, dashboard, dashboard_link
from panels import COLUMNS, lines, number, spans, text
from queries import CHOSEN, Json, Query, grew, quantile, summed

from ipc_handoff.findings import FindingKind
from ipc_handoff.stages import FINDING_EVENT

UID = "dsa-indexer-races"
_FINDINGS = "dsa_indexer_findings_total"
_TOLD = ", ".join(
    [
        "span.dsa.step",
        f"event.{FINDING_EVENT}",
        *(f"event.dsa.{name}" for name in ("stage", "layer", "row", "request", "expected", "seen")),
    ]
)


def races() -> Json:
    this_kind = dashboard_link(UID, "Traces of this kind", "var-kind=${__field.labels.kind}")
    of_kind = 'kind=~"$kind"'
    found = [
        number(
            "By kind, in the time range",
            "Both sides tell what they see, and a worker tells again what its service found in "
            "its inputs: one race may count on both.",
            "short",
            f"sum by (kind) ({grew(_FINDINGS, of_kind)})",
            alarms=0.5,
            legend="{{kind}}",
            width=COLUMNS,
            value_links=[this_kind],
        ),
        lines(
            "By kind",
            "Kinds that rise together have one cause: a torn buffer brings torn_input and "
            "bad_position, a stall brings wait_ended before stale_answer.",
            "ops",
            [Query(summed(_FINDINGS, of_kind, by="kind"), "{{kind}}")],
            width=12,
            value_links=[this_kind],
        ),
        lines(
            "By process",
            "One worker: its engine. All workers of a service: the service, or the host.",
            "ops",
            [Query(summed(_FINDINGS, of_kind, by="job, instance"), "{{job}} {{instance}}")],
            width=12,
        ),
    ]
    steps = [
        spans(
            "Steps in which it was found",
            "One line a span that carries a finding: stage, layer, row, request, what was "
            "expected and what was seen. Open one: likely cause and workaround are in the event.",
            f'{{ event.{FINDING_EVENT} =~ "$kind" }} | select({_TOLD})',
            width=COLUMNS,
        ),
    ]
    came = [
        lines(
            "Rows answered with -1",
            "Nothing was read for them, and their output is wrong.",
            "ops",
            [Query(summed("dsa_indexer_faulted_rows_total", by="instance"), "{{instance}}")],
        ),
        lines(
            "Layers computed inline",
            "What a race or a stall costs in time.",
            "percentunit",
            [Query(f"dsa_indexer:inline_layers:ratio5m{{{CHOSEN}}}", "{{instance}}")],
        ),
        lines(
            "Attachments that ended",
            "After a wait that ended the worker takes another bank and attaches again.",
            "ops",
            [Query(summed("dsa_indexer_detachments_total", by="instance"), "{{instance}}")],
        ),
    ]
    stalls = [
        lines(
            "Waits that ended",
            "In a worker: no answer within its bound. In a service: the worker did not come to "
            "its gate.",
            "ops",
            [
                Query(
                    summed(_FINDINGS, 'kind="wait_ended"', by="job, instance"),
                    "{{job}} {{instance}}",
                )
            ],
        ),
        lines(
            "Gate, p99",
            "How long services wait for their workers. At gate_bound_seconds they give up.",
            "s",
            [
                Query(
                    quantile(0.99, "dsa_indexer_stage_seconds", 'stage="dsa.gate"', by="instance"),
                    "{{instance}}",
                    exemplars=True,
                )
            ],
        ),
        lines(
            "Stale epochs",
            "Calls and plans as of an attachment that has ended.",
            "ops",
            [Query(summed("dsa_indexer_stale_epochs_total", by="instance"), "{{instance}}")],
        ),
        spans(
            "Steps that lost their service",
            "The event says why; stages that the worker told are marked dsa.incomplete.",
            '{ event:name = "detached" } | select(span.dsa.step, span.dsa.epoch, event.dsa.reason)',
            width=COLUMNS,
        ),
    ]
    return dashboard(
        UID,
        "dsa-indexer: races",
        "Findings of both sides, the steps behind them, and what they cost.",
        [
            ("Found", found),
            ("Which steps", steps),
            ("What came of it", came),
            ("Stalls", stalls),
            ("What to do", [text("Kinds", "As the log says it, too.", _advice())]),
        ],
        [choice("kind", "Kind", f"label_values({_FINDINGS}, kind)")],
    )


def _advice() -> str:
    rows = [f"| `{kind}` | {kind.cause} | {kind.workaround} |" for kind in FindingKind]
    head = ["| kind | likely cause | workaround |", "|---|---|---|"]
    where = "From a symptom to its kind: `docs/diagnosing-races.md`."
    return "\n".join([*head, *rows, "", where])
