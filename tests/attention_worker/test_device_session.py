"""What a worker's session on a GPU refuses before it touches one."""

from dataclasses import replace

import pytest
import torch

from attention_worker import device_session
from attention_worker.device_session import DeviceIndexer
from attention_worker.device_steps import DeviceSteps
from attention_worker.placements import Chosen, Placement
from attention_worker.step_shape import StepShape
from indexer_client import ClientSettings, StepInputs
from ipc_handoff.errors import RegionError
from ipc_handoff.layout import HandoffGeometry

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=8, top_k=8, page_size=32, max_rows=4, max_requests=2,
    max_context=64, slots=2,
)  # fmt: skip
CACHE = torch.zeros((2, 32, 12), dtype=torch.uint8)
GPU = torch.device("cuda", 0)


def test_a_worker_on_the_cpu_is_told_of_its_own_session() -> None:
    with pytest.raises(ValueError, match=r"^device: cpu \(fix: .*indexer_client\.Session"):
        DeviceIndexer(GEOMETRY, {3: CACHE, 7: CACHE}, device=torch.device("cpu"))


def test_one_slot_is_too_few() -> None:
    with pytest.raises(ValueError, match=r"^slots: 1 \(fix: 2 or more"):
        DeviceIndexer(replace(GEOMETRY, slots=1), {3: CACHE, 7: CACHE}, device=GPU)


def test_a_missing_k_cache_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^k_caches: layer 7 is missing \(fix: "):
        DeviceIndexer(GEOMETRY, {3: CACHE}, device=GPU)


def test_a_k_cache_whose_pages_have_holes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^k_cache: strides .*\(fix: "):
        DeviceIndexer(GEOMETRY, {3: CACHE[:, ::2], 7: CACHE}, device=GPU)


def test_flags_that_cannot_be_mapped_leave_the_engine_inline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise RegionError("flags: cannot be mapped (fix: a GPU that maps memory)")

    monkeypatch.setattr(device_session.SharedTensor, "of_cuda", lambda tensor, label: tensor)
    monkeypatch.setattr(device_session, "WorkerMemory", lambda *_, **__: None)
    monkeypatch.setattr(device_session, "TimesliceHandoff", refused)
    chosen = Chosen(Placement.TIMESLICE, 0, "asked for")
    terms = device_session._agree(GEOMETRY, {3: CACHE, 7: CACHE}, chosen, 0, ClientSettings())
    assert (terms.chosen.placement, terms.chosen.is_refusal) == (Placement.INLINE, True)
    assert "flags: cannot be mapped" in terms.chosen.reason
    assert (terms.shared, terms.handoff, terms.pool.take()) == ({}, None, None)


def _inputs(**other: object) -> StepInputs:
    return replace(
        StepInputs(
            query_start=torch.tensor([0, 2, 5], dtype=torch.int32),
            seq_lens=torch.tensor([9, 40], dtype=torch.int32),
            block_table=torch.zeros((2, 2), dtype=torch.int32),
            rows=5,
            decode_requests=1,
            rows_per_decode=2,
            max_length=50,
            exact_query_start=[0, 2, 5],
        ),
        **other,
    )


def test_a_step_has_the_hosts_offsets_or_is_refused() -> None:
    shape = StepShape.of(_inputs())
    assert (shape.rows, shape.requests, shape.is_decode) == (5, 2, False)
    assert shape.length_bounds == (50, 50)
    assert StepShape.of(_inputs(exact_seq_lens=[9, 40])).length_bounds == (9, 40)
    with pytest.raises(ValueError, match=r"^exact_query_start: None \(fix: "):
        StepShape.of(_inputs(exact_query_start=None))


def test_a_captured_batch_is_of_whole_requests() -> None:
    shape = StepShape.of_decodes(6, 2, 64)
    assert shape.offsets == (0, 2, 4, 6)
    assert shape.is_decode and shape.rows == 6 and shape.length_bounds == (64, 64, 64)
    for rows in (0, 5):
        with pytest.raises(ValueError, match=rf"^rows: {rows} with 2 a request \(fix: "):
            StepShape.of_decodes(rows, 2, 64)


def test_a_step_is_recorded_with_what_the_host_knows() -> None:
    """Before anything is sent or enqueued: then the device need not be there."""

    class Recorded(Exception):
        pass

    class WithoutDevice:
        geometry = replace(GEOMETRY, max_rows=8)
        _device = torch.device("cpu")

        def _check_process(self) -> None:
            pass

        def _record(self, inputs: StepInputs, layers: tuple[int, ...]) -> None:
            raise Recorded(inputs.exact_query_start, layers)

    with pytest.raises(Recorded) as recorded:
        DeviceSteps.begin_step(WithoutDevice(), _inputs())  # type: ignore[arg-type]
    assert recorded.value.args == ([0, 2, 5], (3, 7))
