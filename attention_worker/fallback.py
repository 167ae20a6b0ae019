"""The indexer inside the worker: what computes a layer when the service does not answer."""

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from indexer_client.inputs import StepInputs
from indexer_service.kernels.checked_inputs import checked_copy
from indexer_service.kernels.checks import fault, positive
from indexer_service.kernels.configuration import Configuration, configuration
from indexer_service.kernels.k_cache.layout import check_k_cache
from indexer_service.kernels.step import RowFault, select_step

logger = logging.getLogger(__name__)


class InlineSelector:
    """Computes a layer's selection in the caller's process, with the service's own code.

    The bits equal the service's where the configurations' hashes are equal. Requests with bad
    lengths or pages answer only -1 and go to `on_faults`; the others are computed.
    """

    def __init__(
        self,
        k_caches: Mapping[int, Tensor],
        top_k: int,
        *,
        workspace: int | None = None,
        on_faults: Callable[[int, list[RowFault]], None] | None = None,
    ) -> None:
        """
        Args:
            k_caches: by layer, uint8 [pages, page, D+4].
            top_k: keys selected for each row.
            workspace: bytes for temporaries (default: 256 MiB).
            on_faults: called with the layer and what was wrong with its inputs; by default the
                first fault of each kind is logged.

        Raises:
            ValueError: a cache's shape, dtype or stride is wrong, or top_k < 1.
        """
        for k_cache in k_caches.values():
            check_k_cache(k_cache)
        self._k_caches = dict(k_caches)
        self._top_k = positive("top_k", top_k)
        self._workspace = workspace
        self._on_faults = on_faults
        self._logged: set[str] = set()
        # A step's table serves all layers: what the shortest cache holds is in all of them.
        self._pages = min((len(k_cache) for k_cache in k_caches.values()), default=0)

    @property
    def configuration(self) -> Configuration:
        """What the selected bits depend on."""
        return configuration()

    def __call__(
        self, layer: int, q: Tensor, weights: Tensor, inputs: StepInputs, out: Tensor
    ) -> None:
        """Writes a layer's selection: q e4m3 [T, H, D], weights fp32 [T, H], out int32 [T, k].

        Raises:
            ValueError: the layer has no K cache here, or a tensor is wrong (`select_step`).
        """
        if layer not in self._k_caches:
            known = ", ".join(map(str, sorted(self._k_caches))) or "none"
            raise fault("layer", f"{layer} has no K cache", f"one of: {known}")
        k_cache = self._k_caches[layer]
        checked = checked_copy(
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_table,
            rows=inputs.rows,
            decode_requests=inputs.decode_requests,
            rows_per_decode=inputs.rows_per_decode,
            pages=self._pages,
            page_size=k_cache.shape[1],
            max_length=inputs.max_length,
            exact_seq_lens=inputs.exact_seq_lens,
            exact_query_start=inputs.exact_query_start,
        )
        if checked.faults:
            # Chosen here: kept, a method of its own would hold the caches in a circle.
            (self._on_faults or self._log_faults)(layer, checked.faults)
        select_step(
            q,
            weights,
            k_cache,
            checked.query_start,
            checked.seq_lens,
            checked.block_table,
            self._top_k,
            decode_requests=inputs.decode_requests,
            rows_per_decode=inputs.rows_per_decode,
            out=out,
            max_length=inputs.max_length,
            skip_requests=checked.skip_requests,
            workspace=self._workspace,
        )

    def _log_faults(self, layer: int, faults: list[RowFault]) -> None:
        for found in faults:
            if found.reason not in self._logged:
                self._logged.add(found.reason)
                logger.warning(
                    "layer %d: request %d answers -1: %s, expected %d, seen %d (told once)",
                    layer,
                    found.request,
                    found.reason,
                    found.expected,
                    found.seen,
                )
