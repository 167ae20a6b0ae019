"""`checked_inputs` on a GPU, without a word to the host: a private copy, checked as it is made.

What a kernel must know of a step lies in device memory (the *numbers*), so that a captured graph
runs any step of its size. Both sides copy with this kernel: they distrust the same requests.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexer_service.kernels.architecture import on
from indexer_service.kernels.checks import expect
from indexer_service.kernels.row_places import Told, first_wrong_row
from indexer_service.kernels.step import (
    LENGTH_OUT_OF_BOUNDS,
    NEGATIVE_LENGTH,
    PAGE_OUT_OF_BOUNDS,
    QUERY_OFFSETS,
    TORN_INPUT,
    RowFault,
)


class StepNumber(IntEnum):
    """int32 words of a step's numbers; exact lengths and then exact offsets follow."""

    ROWS = 0
    REQUESTS = 1
    DECODE_REQUESTS = 2
    ROWS_PER_DECODE = 3
    MAX_LENGTH = 4
    EXACT = 5
    """Bit 0: there are exact lengths; bit 1: exact offsets."""


EXACT_LENGTHS, EXACT_OFFSETS = 1, 2

FAULT_WORDS = 4
"""Of a request: reason, expected, seen, 0."""

REASONS = (
    "",
    TORN_INPUT,
    NEGATIVE_LENGTH,
    LENGTH_OUT_OF_BOUNDS,
    PAGE_OUT_OF_BOUNDS,
    QUERY_OFFSETS,
)
"""By their numbers in `faults`; 0 is none."""

_NUMBERS = tl.constexpr(len(StepNumber))
_REQUESTS = tl.constexpr(int(StepNumber.REQUESTS))
_DECODE = tl.constexpr(int(StepNumber.DECODE_REQUESTS))
_EACH = tl.constexpr(int(StepNumber.ROWS_PER_DECODE))
_MAX_LENGTH = tl.constexpr(int(StepNumber.MAX_LENGTH))
_EXACT = tl.constexpr(int(StepNumber.EXACT))
_HAS_LENGTHS = tl.constexpr(EXACT_LENGTHS)
_HAS_OFFSETS = tl.constexpr(EXACT_OFFSETS)
_TORN = tl.constexpr(REASONS.index(TORN_INPUT))
_NEGATIVE = tl.constexpr(REASONS.index(NEGATIVE_LENGTH))
_BEYOND = tl.constexpr(REASONS.index(LENGTH_OUT_OF_BOUNDS))
_WRONG_PAGE = tl.constexpr(REASONS.index(PAGE_OUT_OF_BOUNDS))
_OFFSETS = tl.constexpr(REASONS.index(QUERY_OFFSETS))
_WORDS = tl.constexpr(FAULT_WORDS)

_COLUMNS = 512
"""Of a table's row, or row ends of a request, at a time."""
_WARPS = 4


def numbers_size(max_requests: int) -> int:
    """int32 words of a step's numbers."""
    return len(StepNumber) + 2 * max_requests + 1


def pack_numbers(
    buffer: Tensor,
    *,
    rows: int,
    requests: int,
    decode_requests: int,
    rows_per_decode: int,
    max_length: int,
    exact_lengths: Sequence[int] | None,
    exact_offsets: Sequence[int] | None,
) -> None:
    """Write a step's numbers into host memory, as `copy_checked` reads them from the device's.

    Args:
        buffer: int32 [numbers_size(max_requests)], on the CPU.
        rows, requests, decode_requests, rows_per_decode, max_length: of the step.
        exact_lengths: [requests], exact_offsets: [requests + 1], where the CPU knows them.
    """
    words = buffer.numpy()
    max_requests = (len(words) - len(StepNumber)) // 2
    has = EXACT_LENGTHS * (exact_lengths is not None) + EXACT_OFFSETS * (exact_offsets is not None)
    words[: len(StepNumber)] = (rows, requests, decode_requests, rows_per_decode, max_length, has)
    at = len(StepNumber)
    if exact_lengths is not None:
        words[at : at + requests] = exact_lengths
    at += max_requests
    if exact_offsets is not None:
        words[at : at + requests + 1] = exact_offsets


class DeviceInputs:
    """A step's private lengths and tables on a device; made once, graphs hold the addresses.

    Attributes:
        seq_lens: int32 [max_requests], 0 for a request that must not be computed.
        block_table: int32 [max_requests, table_width].
        faults: int32 [max_requests, 4]: a number of `REASONS`, expected, seen, 0; the caller's
            memory, if given.
    """

    def __init__(
        self,
        max_requests: int,
        table_width: int,
        device: torch.device,
        *,
        faults: Tensor | None = None,
    ) -> None:
        table, words = (max_requests, table_width), (max_requests, FAULT_WORDS)
        self.seq_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(table, dtype=torch.int32, device=device)
        if faults is None:
            faults = torch.zeros(words, dtype=torch.int32, device=device)
        self.faults = expect("faults", faults, "[max_requests, 4]", words, torch.int32, device)


def faults_of(words: Sequence[Sequence[int]]) -> list[RowFault]:
    """The faults in `DeviceInputs.faults`, brought to the host, of a step's requests."""
    return [
        RowFault(request, REASONS[reason], expected, seen)
        for request, (reason, expected, seen, _) in enumerate(words)
        if reason
    ]


@triton.jit(
    do_not_specialize=(
        "max_requests", "given", "width", "pages", "page_size", "table_stride", "tells_faults",
    ),
    do_not_specialize_on_alignment=(
        "numbers", "query_start", "seq_lens", "block_table", "lengths", "table", "faults",
        "row_ends", "step", "positions", "slots",
    ),
)  # fmt: skip
def copy_checked_kernel(
    numbers, query_start, seq_lens, block_table, lengths, table, faults, row_ends, max_requests,
    given, width, pages, page_size, table_stride: tl.int64, step, positions, slots, tells_faults,
    ROW_ENDS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr, POSITIONS: tl.constexpr,
    SLOTS: tl.constexpr, TELL: tl.constexpr = None, tell=None,
):  # fmt: skip
    """Copy a request's length and table and check them. A program a request.

    given: columns of the caller's table, width: of the copy. Each input is read once: it may
    change meanwhile, and what was checked is what is used. ROW_ENDS: write those of its rows.
    step, positions, slots, tells_faults, TELL, tell: see `Told`; TELL None: nobody is told.
    """
    request = tl.program_id(0)
    requests = tl.load(numbers + _REQUESTS)
    reason = tl.full((), 0, tl.int32)
    expected = tl.full((), 0, tl.int32)
    seen = tl.full((), 0, tl.int32)
    used = tl.full((), 0, tl.int32)
    if request < requests:
        decode = tl.load(numbers + _DECODE)
        each = tl.load(numbers + _EACH)
        max_length = tl.load(numbers + _MAX_LENGTH)
        exact = tl.load(numbers + _EXACT)
        exact_lengths = numbers + _NUMBERS
        exact_offsets = exact_lengths + max_requests

        begin = tl.load(query_start + request)
        end = tl.load(query_start + request + 1)
        length = tl.load(seq_lens + request)
        right_begin, right_end = begin, end
        if (exact & _HAS_OFFSETS) != 0:
            right_begin = tl.load(exact_offsets + request)
            right_end = tl.load(exact_offsets + request + 1)
        elif request < decode:
            right_begin = request * each
            right_end = right_begin + each
        elif request == decode:
            right_begin = decode * each
        right_length = length
        if (exact & _HAS_LENGTHS) != 0:
            right_length = tl.load(exact_lengths + request)

        columns = tl.minimum(tl.minimum(given, width), tl.cdiv(max_length, page_size))
        room = tl.minimum(columns.to(tl.int64), pages.to(tl.int64)) * page_size
        limit = tl.minimum(room, max_length.to(tl.int64)).to(tl.int32)
        needed = tl.cdiv(tl.minimum(tl.maximum(length, 0), limit), page_size)

        first = columns
        wrong_page = tl.full((), 0, tl.int32)
        row = block_table + request.to(tl.int64) * table_stride
        to = table + request.to(tl.int64) * width
        for start in range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            page = tl.load(row + column, mask=column < columns, other=0)
            tl.store(to + column, page, mask=column < columns)
            wrong = ((page < 0) | (page >= pages)) & (column < needed)
            here = tl.min(tl.where(wrong, column, columns), 0)
            if here < first:
                first = here
                wrong_page = tl.sum(tl.where(column == here, page, 0), 0)

        if first < columns:
            reason = tl.full((), _WRONG_PAGE, tl.int32)
            expected, seen = pages, wrong_page
        if length > limit:
            reason = tl.full((), _BEYOND, tl.int32)
            expected, seen = limit, length
        if length < 0:
            reason = tl.full((), _NEGATIVE, tl.int32)
            expected, seen = tl.full((), 0, tl.int32), length
        if length != right_length:
            reason = tl.full((), _TORN, tl.int32)
            expected, seen = right_length, length
        if end <= begin:
            reason = tl.full((), _OFFSETS, tl.int32)
            expected, seen = begin + 1, end
        if end != right_end:
            reason = tl.full((), _OFFSETS, tl.int32)
            expected, seen = right_end, end
        if begin != right_begin:
            reason = tl.full((), _OFFSETS, tl.int32)
            expected, seen = right_begin, begin
        if reason == 0:
            used = length

        if TELL is not None:
            wrong, wrong_row = reason * tells_faults, begin
            right, found = tl.cast(expected, tl.int64), tl.cast(seen, tl.int64)
            if POSITIONS or SLOTS:  # noqa: SIM102 - decided when compiling
                if (reason == 0) & (length > 0):
                    tl.debug_barrier()  # the table was copied by all threads
                    wrong, wrong_row, right, found = first_wrong_row(
                        begin,
                        end,
                        length,
                        to,
                        positions,
                        slots,
                        page_size,
                        POSITIONS,
                        SLOTS,
                        COLUMNS,
                    )
            if wrong != 0:
                TELL(wrong, tl.load(step), -1, wrong_row, request, right, found, *tell, PTX)

        if ROW_ENDS:  # noqa: SIM102 - decided when compiling
            if (request >= decode) & ((exact & _HAS_OFFSETS) != 0):
                for start in range(right_begin, right_end, COLUMNS):
                    number = start + tl.arange(0, COLUMNS)
                    # A row sees what is before it and itself; behind the last row is the length.
                    keys = tl.maximum(used - right_end + 1 + number, 0)
                    tl.store(row_ends + number, keys, mask=number < right_end)
    tl.store(lengths + request, used)
    fault = faults + request * _WORDS
    tl.store(fault, reason)
    tl.store(fault + 1, expected)
    tl.store(fault + 2, seen)


def copy_checked(
    inputs: DeviceInputs,
    numbers: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    bucket: int,
    pages: int,
    page_size: int,
    row_ends: Tensor | None = None,
    told: Told | None = None,
) -> None:
    """Copy a step's lengths and tables and check them, on the current stream; can be captured.

    A request with a fault, and those behind the step's, get length 0: their rows select only -1.
    In order of what is reported: query_offsets (one that differs from its exact value; decode
    requests' offsets follow from their number), torn_input (so does a length), then as
    `step.find_faults`.

    Args:
        inputs: what is written; of the table, the columns that the step's max_length can reach.
        numbers: int32, as `pack_numbers` writes them, on the device.
        query_start: int32 [R+1]; seq_lens: int32 [R]; block_table: int32 [R, n], rows contiguous.
            Others may write them at any time.
        bucket: requests that are written; the step has no more.
        pages, page_size: of the smallest K cache that the step reads.
        row_ends: int32 [rows]: of each row of a prefill request, how many keys it sees. Needs
            exact offsets.
        told: who is told at once, and of what else; nobody waits for that.

    Raises:
        ValueError: `bucket` is more than `inputs` has room for.
    """
    if not 1 <= bucket <= len(inputs.seq_lens):
        raise ValueError(
            f"bucket: {bucket} requests, inputs hold {len(inputs.seq_lens)} "
            "(fix: 1 to the max_requests that inputs were made for)"
        )
    with on(inputs.seq_lens.device):
        copy_checked_kernel[(bucket,)](
            numbers, query_start, seq_lens, block_table, inputs.seq_lens, inputs.block_table,
            inputs.faults, inputs.seq_lens if row_ends is None else row_ends,
            len(inputs.seq_lens), block_table.shape[1], inputs.block_table.shape[1], pages,
            page_size, block_table.stride(0),
            *_told_numbers(told, numbers), ROW_ENDS=row_ends is not None, COLUMNS=_COLUMNS,
            PTX=inputs.seq_lens.is_cuda, POSITIONS=told is not None and told.positions is not None,
            SLOTS=told is not None and told.slots is not None,
            TELL=None if told is None else told.function,
            tell=None if told is None else told.arguments, num_warps=_WARPS,
        )  # fmt: skip


def _told_numbers(told: Told | None, nothing: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tensors of `told`, and something in the place of those that are not there."""
    if told is None:
        return nothing, nothing, nothing, 0
    tensors = (told.positions, told.slots)
    positions, slots = (told.step if given is None else given for given in tensors)
    return told.step, positions, slots, int(told.tells_faults)
