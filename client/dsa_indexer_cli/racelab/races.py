"""Every race that the lab provokes on the CPU transport, with the detector that must catch it."""

from dsa_indexer_cli.racelab import provocations as race
from dsa_indexer_cli.racelab.bench import HASTY, PATIENT
from dsa_indexer_cli.racelab.provocation import Provocation
from ipc_handoff.detectors import Detector
from ipc_handoff.findings import FindingKind

PROVOCATIONS = (
    Provocation(
        "pinned buffer: step N reads step N+1's lengths",
        FindingKind.TORN_INPUT,
        Detector.INPUTS,
        race.torn_lengths,
        PATIENT,
    ),
    Provocation(
        "pinned buffer under speculative decoding: bounds only",
        FindingKind.BAD_POSITION,
        Detector.POSITIONS,
        race.torn_speculative_lengths,
        PATIENT,
    ),
    Provocation(
        "pinned buffer: a length beyond its bound",
        FindingKind.BAD_LENGTH,
        Detector.INPUTS,
        race.lengths_beyond_the_bound,
        PATIENT,
    ),
    Provocation(
        "pinned buffer: query offsets",
        FindingKind.BAD_QUERY_OFFSETS,
        Detector.INPUTS,
        race.torn_offsets,
        PATIENT,
    ),
    Provocation(
        "pinned buffer: slot mapping",
        FindingKind.BAD_SLOT,
        Detector.POSITIONS,
        race.torn_slots,
        PATIENT,
    ),
    Provocation(
        "pinned buffer: block table",
        FindingKind.BAD_PAGE,
        Detector.INPUTS,
        race.torn_table,
        PATIENT,
    ),
    Provocation(
        "publish race: lengths read before they are written",
        FindingKind.READ_BEFORE_WRITTEN,
        Detector.GENERATIONS,
        race.publish_race,
        PATIENT,
    ),
    Provocation(
        "request race: q read before it is written",
        FindingKind.READ_BEFORE_WRITTEN,
        Detector.GENERATIONS,
        race.request_race,
        PATIENT,
    ),
    Provocation(
        "lengths overwritten while they are copied",
        FindingKind.OVERWRITTEN_BEFORE_READ,
        Detector.GENERATIONS,
        race.overwritten_inputs,
        PATIENT,
    ),
    Provocation(
        "q overwritten while it is scored",
        FindingKind.OVERWRITTEN_BEFORE_READ,
        Detector.GENERATIONS,
        race.overwritten_query,
        PATIENT,
    ),
    Provocation(
        "answer rung before it is written",
        FindingKind.STALE_ANSWER,
        Detector.GENERATIONS,
        race.answer_rung_too_early,
        PATIENT,
    ),
    Provocation(
        "answer overwritten while it is handed back",
        FindingKind.OVERWRITTEN_BEFORE_READ,
        Detector.GENERATIONS,
        race.answer_overwritten,
        PATIENT,
    ),
    Provocation(
        "shared indices of another step",
        FindingKind.SHARED_INDEX_LEAK,
        Detector.SHARED_INDICES,
        race.leaked_selection,
        PATIENT,
    ),
    Provocation("NaN in q", FindingKind.NAN_SCORES, Detector.NAN_SCORES, race.nan_query, PATIENT),
    Provocation(
        "NaN in one key's scale", FindingKind.NAN_SCORES, Detector.NAN_SCORES, race.nan_key, PATIENT
    ),
    Provocation(
        "gate without its worker",
        FindingKind.WAIT_ENDED,
        Detector.WAITS,
        race.gate_ended,
        HASTY,
    ),
    Provocation(
        "wait without its service",
        FindingKind.WAIT_ENDED,
        Detector.WAITS,
        race.wait_ended,
        HASTY,
    ),
)
