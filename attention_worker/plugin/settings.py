"""The plugin's own settings, beside the client's (`indexer_client.settings`)."""

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from indexer_client.settings import ClientSettings

_WISHES = {"address", "placement"}


class PluginSettings(BaseSettings):
    """Every field is a variable: DSA_INDEXER_ON_REFUSAL and so on. An empty one counts as none."""

    model_config = SettingsConfigDict(
        env_prefix="DSA_INDEXER_", env_ignore_empty=True, extra="ignore"
    )

    allow_untested: bool = Field(
        default=False, description="serve vLLM versions whose source was only read, too"
    )
    on_refusal: Literal["inline", "error"] = Field(
        default="inline",
        description="without a service: compute in the engine's process, or end the engine",
    )
    attach_seconds: float = Field(
        default=30.0, gt=0, description="how long `error` waits for the service"
    )
    service_device: int | None = Field(
        default=None, ge=0, description="ordinal of the service's GPU, if it has one of its own"
    )
    service_memory_mib: int = Field(
        default=1024,
        ge=0,
        description="memory of the worker's GPU that vLLM leaves to a service under MPS",
    )
    guard_pinned_buffers: bool = Field(
        default=True,
        description="wait for copies of pinned inputs where vLLM does not (pull request 47644)",
    )


def asks_for_plugin(client: ClientSettings) -> bool:
    """Whether somebody said where indices come from; then vLLM's own indexer is replaced."""
    return bool(_WISHES & client.model_fields_set)


def asks_for_service(client: ClientSettings) -> bool:
    """Whether a service is wanted: an address, or a placement that has one."""
    return asks_for_plugin(client) and client.placement != "inline"
