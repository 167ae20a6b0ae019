"""Is it well, how much does it do, and where does one look next?"""

from board import dashboard, dashboard_link
from panels import alerts, lines, number
from queries import CHOSEN, Json, Query, grew, quantile, quantiles, summed

UID = "dsa-indexer-overview"
_ANATOMY = dashboard_link("dsa-indexer-anatomy", "Step anatomy")
_RACES = dashboard_link("dsa-indexer-races", "Races")
_OF_KIND = dashboard_link(
    "dsa-indexer-races", "Traces of this kind", "var-kind=${__field.labels.kind}"
)


def overview() -> Json:
    layers = "dsa_indexer_layers_total"
    inline = summed(layers, 'source="inline"')
    well = [
        number(
            "Steps a second",
            "Steps that services answered.",
            "ops",
            summed("dsa_indexer_steps_total", 'status="answered"'),
        ),
        number(
            "Computed inline",
            "Share of layers that workers computed themselves. Right answers, and slower ones.",
            "percentunit",
            f"{inline} / {summed(layers)}",
            warns=0.01,
            alarms=0.05,
        ),
        number(
            "Findings",
            "Races, untrusted inputs and waits that ended, of both sides, in the time range.",
            "short",
            f"sum({grew('dsa_indexer_findings_total')})",
            alarms=0.5,
            links=[_RACES],
        ),
        number(
            "Untrusted rows",
            "That were answered with -1, in the time range. Their requests attended to nothing in "
            "a layer: wrong output.",
            "short",
            f"sum({grew('dsa_indexer_faulted_rows_total')})",
            alarms=0.5,
            links=[_RACES],
        ),
        number(
            "Step of a service, p99",
            "From the first gate passed to the last stamp, all layers.",
            "s",
            quantile(0.99, "dsa_indexer_step_seconds", 'side="service"'),
            links=[_ANATOMY],
        ),
        number(
            "Alerts",
            "That fire now; they are listed below.",
            "short",
            'count(ALERTS{alertname=~"DsaIndexer.*", alertstate="firing"}) or vector(0)',
            alarms=1,
        ),
        alerts("Firing", "What each means and what to do: docs/observability.md, Alerts."),
    ]
    errors = [
        lines(
            "Steps by how they ended",
            "cancelled: the worker gave up or did not come; failed: the engine raised; rejected: "
            "a plan that cannot be right.",
            "ops",
            [Query(summed("dsa_indexer_steps_total", by="status"), "{{status}}")],
            stacked="normal",
        ),
        lines(
            "Layers by where they were computed",
            "service, or inline: by the worker itself.",
            "ops",
            [Query(summed(layers, by="source"), "{{source}}")],
            stacked="normal",
        ),
        lines(
            "Computed inline, by worker",
            "Which worker is on its own. 1 from the start: it never attached; a step up: it lost "
            "its service.",
            "percentunit",
            [Query(f"dsa_indexer:inline_layers:ratio5m{{{CHOSEN}}}", "{{instance}}")],
        ),
        lines(
            "Findings by kind",
            "wait_ended is an outage more often than a race; all others mean that data was "
            "overwritten, read early, or wrong.",
            "ops",
            [Query(summed("dsa_indexer_findings_total", by="kind"), "{{kind}}")],
            width=12,
            links=[_RACES],
            value_links=[_OF_KIND],
        ),
        lines(
            "Rows answered with -1",
            "By service. Findings of the same time say why.",
            "ops",
            [Query(summed("dsa_indexer_faulted_rows_total", by="instance"), "{{instance}}")],
            width=12,
        ),
    ]
    latency = [
        lines(
            "Step, as services see it",
            "Without the time before its first gate passed. Points are steps that have a trace.",
            "s",
            quantiles("dsa_indexer_step_seconds", 'side="service"'),
            links=[_ANATOMY],
        ),
        lines(
            "Step, as workers see it",
            "With staging, waiting and attention.",
            "s",
            quantiles("dsa_indexer_step_seconds", 'side="worker"'),
            links=[_ANATOMY],
        ),
        lines(
            "Stages of a layer, p99",
            "The one that grew is the one to look at.",
            "s",
            [
                Query(
                    quantile(0.99, "dsa_indexer_stage_seconds", by="stage"),
                    "{{stage}}",
                    exemplars=True,
                )
            ],
            links=[_ANATOMY],
        ),
    ]
    attachments = [
        lines(
            "Attachments",
            "A day without restarts has none. Those that began again follow those that ended.",
            "ops",
            [
                Query(summed("dsa_indexer_attachments_total"), "began"),
                Query(summed("dsa_indexer_reattachments_total"), "began again"),
                Query(summed("dsa_indexer_detachments_total"), "ended by themselves"),
            ],
            width=12,
        ),
        lines(
            "Stale epochs",
            "Calls and plans as of an attachment that has ended. One or two after a restart are "
            "normal.",
            "ops",
            [Query(summed("dsa_indexer_stale_epochs_total", by="instance"), "{{instance}}")],
            width=12,
        ),
    ]
    held = [
        lines(
            title,
            description,
            unit,
            [Query(f"{metric}{{{CHOSEN}}}", "{{instance}}")],
            width=6,
        )
        for title, description, unit, metric in (
            ("Sessions", "One a worker and model.", "short", "dsa_indexer_sessions"),
            ("Regions", "K caches and banks that are registered.", "short", "dsa_indexer_regions"),
            (
                "Mapped memory",
                "Of workers. It falls to zero with the sessions, or something is left.",
                "bytes",
                "dsa_indexer_mapped_bytes",
            ),
            (
                "Plans that wait",
                "For their turn. More than a few for long: more sessions than the device serves.",
                "short",
                "dsa_indexer_queued_steps",
            ),
        )
    ]
    seen = [
        lines(
            "Traces",
            "kept: a side's spans of a step were exported; dropped: nothing happened in it, and "
            "its ratio did not choose it.",
            "ops",
            [
                Query(
                    summed("dsa_indexer_traces_total", by="job, decision"),
                    "{{job}} {{decision}}",
                )
            ],
        ),
        lines(
            "Stamps that were lost",
            "Steps whose stamps were overwritten before they were read: their traces have holes.",
            "ops",
            [Query(summed("dsa_indexer_lost_stamps_total", by="side"), "{{side}}")],
        ),
        lines(
            "What Prometheus reads",
            "1: it can be read. The collector stands for all that comes by OTLP.",
            "short",
            [Query("up", "{{job}} {{instance}}")],
        ),
    ]
    return dashboard(
        UID,
        "dsa-indexer: overview",
        "Rate, errors, latency and what is held, of services and workers.",
        [
            ("Is it well?", well),
            ("Rate and errors", errors),
            ("Latency", latency),
            ("Attachments", attachments),
            ("What services hold", held),
            ("What is seen of it", seen),
        ],
    )
