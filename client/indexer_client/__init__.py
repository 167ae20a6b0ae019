"""Engine-side client of the indexer service.

from indexer_client import Session, StepInputs

with Session(geometry, k_caches, fallback) as session:
    with session.step(inputs) as step:
        step.select(layer, q, weights, out=topk_indices)
"""

from indexer_client.errors import (
    AlreadyExists,
    AttachRefused,
    IndexerError,
    InvalidRequest,
    LeaseExpired,
    LimitExceeded,
    NotFound,
    ServiceUnavailable,
    WrongState,
)
from indexer_client.inputs import Fallback, StepInputs
from indexer_client.session import Session
from indexer_client.settings import ClientSettings
from indexer_client.statistics import Statistics
from indexer_client.step import Source, Step

__all__ = [
    "AlreadyExists",
    "AttachRefused",
    "ClientSettings",
    "Fallback",
    "IndexerError",
    "InvalidRequest",
    "LeaseExpired",
    "LimitExceeded",
    "NotFound",
    "ServiceUnavailable",
    "Session",
    "Source",
    "Statistics",
    "Step",
    "StepInputs",
    "WrongState",
]
