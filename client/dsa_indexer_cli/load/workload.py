"""What a load test does: a small TOML file, or one of those that come with the program."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dsa_indexer_cli.load.distributions import Distribution, Fixed
from indexer_client.inputs import MAX_ROWS_PER_DECODE
from indexer_service.settings import first_complaint
from ipc_handoff.layout import HandoffGeometry

_SUFFIX = ".toml"
HEAD_DIM = 128

AUTO, CPU, INLINE, MPS, PEER_GPU = "auto", "cpu", "inline", "mps", "peer_gpu"
"""Placements of which a load test knows more than their names."""


class WorkloadError(Exception):
    """A workload that cannot be used; names the key and the fix."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Table):
    """The model whose indexer is asked.

    Attributes:
        layers: attention layers.
        index_share: layers in a row that use one selection (IndexShare); only the first of them
            has an indexer, and asks.
        cache_tokens: of each layer's K cache; 0: of the longest request on a CPU, of all requests
            of the largest step on a GPU. What requests do not find room for, they share.
    """

    layers: int = Field(default=4, ge=1, le=256)
    index_share: int = Field(default=1, ge=1)
    cache_tokens: int = Field(default=0, ge=0)
    heads: Literal[16, 32, 64, 128] = 16
    top_k: int = Field(default=256, ge=1, le=2048)
    page_size: Literal[32, 64, 128] = 64

    @property
    def indexer_layers(self) -> tuple[int, ...]:
        return tuple(range(0, self.layers, self.index_share))


class Load(_Table):
    """How hard.

    Attributes:
        mode: `closed`: each session begins a step when the one before has ended; `open`: steps
            arrive at `rate`, whatever became of those before; `recorded`: when they were recorded.
        rate: steps a second of each session.
        arrivals: gaps of an open loop: equal, or as of independent events.
        reopen_seconds: each session is closed and opened anew so often; 0: never.
        placement: as in the client's settings; `auto`: what the service, or else the host, gives.
        device: ordinal of the sessions' GPU.
        signalling, wait_bound_seconds: as in the client's settings, and with their defaults, of
            which a GPU has its own.
        ahead_seconds: on a GPU, between a step's plan and its forward: a host that enqueues ahead.
        attach_seconds: a session that has no service for so long has failed; by default after a
            minute, or five on a GPU, where kernels are made first.
    """

    mode: Literal["closed", "open", "recorded"] = "closed"
    sessions: int = Field(default=1, ge=1, le=64)
    seconds: float = Field(default=10.0, gt=0, le=7 * 86400)
    warm_up_seconds: float = Field(default=1.0, ge=0, le=3600)
    rate: float = Field(default=10.0, gt=0, le=100_000)
    arrivals: Literal["poisson", "constant"] = "poisson"
    reopen_seconds: float = Field(default=0.0, ge=0)
    placement: Literal["auto", "mps", "peer_gpu", "timeslice", "inline", "cpu"] = "auto"
    device: int = Field(default=0, ge=0)
    signalling: Literal["ring", "stream"] = "ring"
    wait_bound_seconds: float | None = Field(default=None, gt=0)
    ahead_seconds: float = Field(default=0.0, ge=0, le=1)
    attach_seconds: float | None = Field(default=None, gt=0, le=900)


class Mix(_Table):
    """Weights of the kinds of steps."""

    decode: float = Field(default=1.0, ge=0)
    mixed: float = Field(default=0.0, ge=0)
    prefill: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _some(self) -> "Mix":
        if not self.decode + self.mixed + self.prefill:
            raise ValueError("one weight or more must not be 0")
        return self


class Steps(_Table):
    """What steps look like.

    Attributes:
        batch: decode requests of a step.
        context: tokens of a request.
        same_context: all requests of a step have as many, so that times can be told apart by it.
        prefill_rows: rows of the prefill request in a mixed or prefill step.
        rows_per_decode: 1, or more where drafts are verified (MTP).
    """

    batch: Distribution = Fixed(kind="fixed", value=4)
    context: Distribution = Fixed(kind="fixed", value=1024)
    prefill_rows: Distribution = Fixed(kind="fixed", value=32)
    same_context: bool = False
    rows_per_decode: int = Field(default=1, ge=1, le=MAX_ROWS_PER_DECODE)
    mix: Mix = Mix()
    seed: int = 1


class Check(_Table):
    """How many answers are compared with the reference."""

    share: float = Field(default=0.02, ge=0, le=1)


class Limits(_Table):
    """What must hold for exit status 0. Wrong answers and failed sessions never pass."""

    step_p50_milliseconds: float | None = Field(default=None, gt=0)
    step_p99_milliseconds: float | None = Field(default=None, gt=0)
    layer_p99_milliseconds: float | None = Field(default=None, gt=0)
    steps_a_second: float | None = Field(default=None, gt=0)
    inline_share: float = Field(default=0.0, ge=0, le=1)
    unserved_steps: int = Field(default=0, ge=0)


class Soak(_Table):
    """Growth that is allowed from the first quarter to the last, of each process.

    Attributes:
        sample_seconds: how often is looked.
        gpu_memory_mib: of a whole GPU, whoever holds it.
    """

    sample_seconds: float = Field(default=1.0, gt=0)
    memory_mib: float = Field(default=16.0, ge=0)
    mappings: int = Field(default=0, ge=0)
    descriptors: int = Field(default=0, ge=0)
    threads: int = Field(default=0, ge=0)
    gpu_memory_mib: float = Field(default=64.0, ge=0)


class Replay(_Table):
    """Steps that an engine recorded (`DSA_INDEXER_RECORD`) instead of drawn ones."""

    file: Path


class Workload(_Table):
    """The whole file."""

    name: str = ""
    model: Model = Model()
    load: Load = Load()
    steps: Steps = Steps()
    check: Check = Check()
    limits: Limits = Limits()
    soak: Soak | None = None
    replay: Replay | None = None

    @model_validator(mode="after")
    def _has_times(self) -> "Workload":
        if self.load.mode == "recorded" and self.replay is None:
            raise WorkloadError("load.mode: nothing was recorded (fix: replay.file, or another)")
        return self

    @property
    def geometry(self) -> HandoffGeometry:
        """What a session agrees on with the service, unless the steps are recorded ones."""
        steps = self.steps
        batch = max(steps.batch.most, 1)
        prefills = bool(steps.mix.mixed or steps.mix.prefill)
        return HandoffGeometry(
            layers=self.model.indexer_layers,
            heads=self.model.heads,
            head_dim=HEAD_DIM,
            top_k=self.model.top_k,
            page_size=self.model.page_size,
            max_rows=batch * steps.rows_per_decode + prefills * max(steps.prefill_rows.most, 1),
            max_requests=batch + prefills,
            max_context=max(steps.context.most, steps.prefill_rows.most, steps.rows_per_decode),
        )


def built_in() -> list[str]:
    """Names of the workloads that come with the program."""
    folder = files("dsa_indexer_cli.load") / "workloads"
    return sorted(
        entry.name.removesuffix(_SUFFIX)
        for entry in folder.iterdir()
        if entry.name.endswith(_SUFFIX)
    )


def load_workload(named: str, changes: dict[str, Any] | None = None) -> Workload:
    """Read a workload.

    Args:
        named: a file, or the name of one that comes with the program.
        changes: values by dotted key ("load.seconds") that replace the file's.

    Raises:
        WorkloadError: no such file, or a key or value that does not fit.
    """
    values = _read(named)
    for key, value in (changes or {}).items():
        *tables, last = key.split(".")
        table = values
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise WorkloadError(f"{key}: {name} is no table (fix: another key)")
        table[last] = value
    try:
        return Workload(**{"name": Path(named).stem, **values})
    except ValidationError as error:
        key, given, wish = first_complaint(error)
        raise WorkloadError(f"{key}: {given!r} cannot be used (fix: {wish})") from None


def _read(named: str) -> dict[str, Any]:
    path = Path(named)
    if named in built_in():
        path = Path(str(files("dsa_indexer_cli.load") / "workloads" / f"{named}{_SUFFIX}"))
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(
            f"workload: {named}: {error.strerror} (fix: a TOML file, or {', '.join(built_in())})"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WorkloadError(f"workload: {named}: {error} (fix: write valid TOML)") from None


def parse_change(text: str) -> tuple[str, Any]:
    """A change on the command line: `load.seconds=5`, `steps.batch={kind="fixed", value=2}`.

    Raises:
        WorkloadError: it is none.
    """
    key, equals, value = text.partition("=")
    try:
        if not equals or not key:
            raise ValueError
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except ValueError:
        raise WorkloadError(
            f"set: {text!r} (fix: KEY=VALUE with a TOML value, as load.seconds=5)"
        ) from None
