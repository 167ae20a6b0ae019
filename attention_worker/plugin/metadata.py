"""The metadata of TRITON_MLA_SPARSE: whose rows are whose, and where their pages are."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata

from attention_worker.plugin.attention_warm_up import warm_up_attention
from attention_worker.plugin.builder import Builder, rows_per_decode


@dataclass
class SparseMLAMetadata(AttentionMetadata):
    """Every row attends to its own selection, so that to the kernels all rows are decodes; vLLM's
    layer is told so (`num_decode_tokens`).

    Attributes:
        num_actual_tokens: T, rows of the batch, padded for a graph.
        block_table: int32 [R, n], pages of each request.
        request_of_row: int32 [T], row of the block table.
        slot_mapping: int64 [T], where keys and values go.
        query_start_loc, seq_lens: int32 [R + 1] and [R].
    """

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table: Tensor
    request_of_row: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill_max_seq_len: int = 0
    prefill: None = None
    decode: None = None


class SparseMLAMetadataBuilder(Builder[SparseMLAMetadata]):
    """Graphs hold the addresses of what a uniform batch of decodes is given."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        warm_up_attention(self.vllm_config, self.kv_cache_spec, self.device)
        self._rows_per_decode = rows_per_decode(self.vllm_config)
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        rows = torch.arange(most, dtype=torch.int32, device=self.device)
        self._request_of_decode_row = rows // self._rows_per_decode

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SparseMLAMetadata:
        common = common_attn_metadata
        return SparseMLAMetadata(
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            block_table=common.block_table_tensor,
            request_of_row=self._request_of_row(common),
            slot_mapping=common.slot_mapping,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )

    def _request_of_row(self, common: Any) -> Tensor:
        """int32 [T]; of rows that are padding any request."""
        rows: int = common.num_actual_tokens
        counts: Tensor = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
        each = self._rows_per_decode
        if bool(((counts == each) | (counts == 0)).all()):
            return self._request_of_decode_row[:rows]
        requests = torch.arange(len(counts), dtype=torch.int32)
        of_row = torch.zeros(rows, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        known = torch.repeat_interleave(requests, counts)
        of_row[: len(known)] = known
        return of_row.to(self.device, non_blocking=True)
