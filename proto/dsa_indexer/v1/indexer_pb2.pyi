from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Placement(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_UNSPECIFIED: _ClassVar[Placement]
    PLACEMENT_CPU: _ClassVar[Placement]
    PLACEMENT_MPS: _ClassVar[Placement]
    PLACEMENT_PEER_GPU: _ClassVar[Placement]
    PLACEMENT_TIMESLICE: _ClassVar[Placement]

class Signalling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SIGNALLING_UNSPECIFIED: _ClassVar[Signalling]
    SIGNALLING_RING: _ClassVar[Signalling]
    SIGNALLING_STREAM: _ClassVar[Signalling]

class KCacheLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    K_CACHE_LAYOUT_UNSPECIFIED: _ClassVar[KCacheLayout]
    K_CACHE_LAYOUT_PLANAR_E4M3: _ClassVar[KCacheLayout]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT8_E4M3: _ClassVar[DataType]

class StepStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_STATUS_UNSPECIFIED: _ClassVar[StepStatus]
    STEP_STATUS_ANSWERED: _ClassVar[StepStatus]
    STEP_STATUS_REJECTED: _ClassVar[StepStatus]
    STEP_STATUS_CANCELLED: _ClassVar[StepStatus]
    STEP_STATUS_FAILED: _ClassVar[StepStatus]

class RowFaultReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_FAULT_REASON_UNSPECIFIED: _ClassVar[RowFaultReason]
    ROW_FAULT_REASON_NEGATIVE_LENGTH: _ClassVar[RowFaultReason]
    ROW_FAULT_REASON_LENGTH_OUT_OF_BOUNDS: _ClassVar[RowFaultReason]
    ROW_FAULT_REASON_PAGE_OUT_OF_BOUNDS: _ClassVar[RowFaultReason]
    ROW_FAULT_REASON_TORN_INPUT: _ClassVar[RowFaultReason]
    ROW_FAULT_REASON_QUERY_OFFSETS: _ClassVar[RowFaultReason]
PLACEMENT_UNSPECIFIED: Placement
PLACEMENT_CPU: Placement
PLACEMENT_MPS: Placement
PLACEMENT_PEER_GPU: Placement
PLACEMENT_TIMESLICE: Placement
SIGNALLING_UNSPECIFIED: Signalling
SIGNALLING_RING: Signalling
SIGNALLING_STREAM: Signalling
K_CACHE_LAYOUT_UNSPECIFIED: KCacheLayout
K_CACHE_LAYOUT_PLANAR_E4M3: KCacheLayout
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_INT64: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_FLOAT8_E4M3: DataType
STEP_STATUS_UNSPECIFIED: StepStatus
STEP_STATUS_ANSWERED: StepStatus
STEP_STATUS_REJECTED: StepStatus
STEP_STATUS_CANCELLED: StepStatus
STEP_STATUS_FAILED: StepStatus
ROW_FAULT_REASON_UNSPECIFIED: RowFaultReason
ROW_FAULT_REASON_NEGATIVE_LENGTH: RowFaultReason
ROW_FAULT_REASON_LENGTH_OUT_OF_BOUNDS: RowFaultReason
ROW_FAULT_REASON_PAGE_OUT_OF_BOUNDS: RowFaultReason
ROW_FAULT_REASON_TORN_INPUT: RowFaultReason
ROW_FAULT_REASON_QUERY_OFFSETS: RowFaultReason

class Worker(_message.Message):
    __slots__ = ("instance", "engine", "pid", "gpu_uuid", "model", "group")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    instance: str
    engine: str
    pid: int
    gpu_uuid: str
    model: str
    group: Group
    def __init__(self, instance: _Optional[str] = ..., engine: _Optional[str] = ..., pid: _Optional[int] = ..., gpu_uuid: _Optional[str] = ..., model: _Optional[str] = ..., group: _Optional[_Union[Group, _Mapping]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("name", "rank", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    size: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("layers", "heads", "head_dim", "top_k", "page_size", "k_cache_layout", "max_rows", "max_requests", "max_context")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    K_CACHE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    heads: int
    head_dim: int
    top_k: int
    page_size: int
    k_cache_layout: KCacheLayout
    max_rows: int
    max_requests: int
    max_context: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., top_k: _Optional[int] = ..., page_size: _Optional[int] = ..., k_cache_layout: _Optional[_Union[KCacheLayout, str]] = ..., max_rows: _Optional[int] = ..., max_requests: _Optional[int] = ..., max_context: _Optional[int] = ...) -> None: ...

class HandoffLayout(_message.Message):
    __slots__ = ("version", "fingerprint", "slots")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    fingerprint: int
    slots: int
    def __init__(self, version: _Optional[int] = ..., fingerprint: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class EngineConfiguration(_message.Message):
    __slots__ = ("engine", "settings", "hash")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    engine: str
    settings: _containers.ScalarMap[str, str]
    hash: str
    def __init__(self, engine: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ..., hash: _Optional[str] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("worker", "geometry", "layout", "placement", "signalling", "engine", "required_configuration_hash")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNALLING_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_CONFIGURATION_HASH_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    geometry: Geometry
    layout: HandoffLayout
    placement: Placement
    signalling: Signalling
    engine: str
    required_configuration_hash: str
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., layout: _Optional[_Union[HandoffLayout, _Mapping]] = ..., placement: _Optional[_Union[Placement, str]] = ..., signalling: _Optional[_Union[Signalling, str]] = ..., engine: _Optional[str] = ..., required_configuration_hash: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "epoch", "lease_seconds", "configuration", "placement", "signalling", "reasons", "descriptor_nonce", "descriptor_socket", "service_version", "layout")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNALLING_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_NONCE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_SOCKET_FIELD_NUMBER: _ClassVar[int]
    SERVICE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    lease_seconds: float
    configuration: EngineConfiguration
    placement: Placement
    signalling: Signalling
    reasons: _containers.RepeatedScalarFieldContainer[str]
    descriptor_nonce: bytes
    descriptor_socket: str
    service_version: str
    layout: HandoffLayout
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., configuration: _Optional[_Union[EngineConfiguration, _Mapping]] = ..., placement: _Optional[_Union[Placement, str]] = ..., signalling: _Optional[_Union[Signalling, str]] = ..., reasons: _Optional[_Iterable[str]] = ..., descriptor_nonce: _Optional[bytes] = ..., descriptor_socket: _Optional[str] = ..., service_version: _Optional[str] = ..., layout: _Optional[_Union[HandoffLayout, _Mapping]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("name", "cuda_ipc", "host", "byte_size", "shape", "strides", "data_type")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    cuda_ipc: CudaIpcMemory
    host: HostMemory
    byte_size: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    data_type: DataType
    def __init__(self, name: _Optional[str] = ..., cuda_ipc: _Optional[_Union[CudaIpcMemory, _Mapping]] = ..., host: _Optional[_Union[HostMemory, _Mapping]] = ..., byte_size: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., data_type: _Optional[_Union[DataType, str]] = ...) -> None: ...

class CudaIpcMemory(_message.Message):
    __slots__ = ("handle", "offset", "gpu_uuid", "allocation")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset: int
    gpu_uuid: str
    allocation: int
    def __init__(self, handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., gpu_uuid: _Optional[str] = ..., allocation: _Optional[int] = ...) -> None: ...

class HostMemory(_message.Message):
    __slots__ = ("token", "offset")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    token: int
    offset: int
    def __init__(self, token: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class RegisterRegionsRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "regions")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ...) -> None: ...

class RegisterRegionsResponse(_message.Message):
    __slots__ = ("mapped_bytes",)
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    mapped_bytes: int
    def __init__(self, mapped_bytes: _Optional[int] = ...) -> None: ...

class UnregisterRegionsRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "names")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class UnregisterRegionsResponse(_message.Message):
    __slots__ = ("mapped_bytes",)
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    mapped_bytes: int
    def __init__(self, mapped_bytes: _Optional[int] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step", "epoch", "rows", "requests", "decode_requests", "rows_per_decode", "layers", "max_length", "exact", "trace", "row_range")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_DECODE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    ROW_RANGE_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    rows: int
    requests: int
    decode_requests: int
    rows_per_decode: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    max_length: int
    exact: ExactValues
    trace: TraceContext
    row_range: RowRange
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., rows: _Optional[int] = ..., requests: _Optional[int] = ..., decode_requests: _Optional[int] = ..., rows_per_decode: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., max_length: _Optional[int] = ..., exact: _Optional[_Union[ExactValues, _Mapping]] = ..., trace: _Optional[_Union[TraceContext, _Mapping]] = ..., row_range: _Optional[_Union[RowRange, _Mapping]] = ...) -> None: ...

class ExactValues(_message.Message):
    __slots__ = ("seq_lens", "query_start")
    SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_START_FIELD_NUMBER: _ClassVar[int]
    seq_lens: _containers.RepeatedScalarFieldContainer[int]
    query_start: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq_lens: _Optional[_Iterable[int]] = ..., query_start: _Optional[_Iterable[int]] = ...) -> None: ...

class RowRange(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("trace_id", "span_id", "flags")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    trace_id: bytes
    span_id: bytes
    flags: int
    def __init__(self, trace_id: _Optional[bytes] = ..., span_id: _Optional[bytes] = ..., flags: _Optional[int] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "epoch", "status", "code", "message", "answered_layers", "faults", "fault_count", "duration_ns")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    FAULT_COUNT_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    status: StepStatus
    code: int
    message: str
    answered_layers: _containers.RepeatedScalarFieldContainer[int]
    faults: _containers.RepeatedCompositeFieldContainer[RowFault]
    fault_count: int
    duration_ns: int
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., status: _Optional[_Union[StepStatus, str]] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., answered_layers: _Optional[_Iterable[int]] = ..., faults: _Optional[_Iterable[_Union[RowFault, _Mapping]]] = ..., fault_count: _Optional[int] = ..., duration_ns: _Optional[int] = ...) -> None: ...

class RowFault(_message.Message):
    __slots__ = ("row", "request", "reason", "expected", "seen")
    ROW_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    row: int
    request: int
    reason: RowFaultReason
    expected: int
    seen: int
    def __init__(self, row: _Optional[int] = ..., request: _Optional[int] = ..., reason: _Optional[_Union[RowFaultReason, str]] = ..., expected: _Optional[int] = ..., seen: _Optional[int] = ...) -> None: ...

class RunStepsRequest(_message.Message):
    __slots__ = ("session_id", "plan")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    plan: StepPlan
    def __init__(self, session_id: _Optional[str] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ...) -> None: ...

class RunStepsResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: StepReport
    def __init__(self, report: _Optional[_Union[StepReport, _Mapping]] = ...) -> None: ...

class SelectTopKRequest(_message.Message):
    __slots__ = ("session_id", "plan")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    plan: StepPlan
    def __init__(self, session_id: _Optional[str] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ...) -> None: ...

class SelectTopKResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: StepReport
    def __init__(self, report: _Optional[_Union[StepReport, _Mapping]] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("cancelled_steps",)
    CANCELLED_STEPS_FIELD_NUMBER: _ClassVar[int]
    cancelled_steps: int
    def __init__(self, cancelled_steps: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "pid", "uptime_seconds", "gpu_uuid", "configuration", "sessions", "mapped_bytes", "compiled_kernels", "serving")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPILED_KERNELS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    uptime_seconds: float
    gpu_uuid: str
    configuration: EngineConfiguration
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    mapped_bytes: int
    compiled_kernels: int
    serving: bool
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., gpu_uuid: _Optional[str] = ..., configuration: _Optional[_Union[EngineConfiguration, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., mapped_bytes: _Optional[int] = ..., compiled_kernels: _Optional[int] = ..., serving: bool = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("epoch", "worker", "placement", "signalling", "configuration", "lease_remaining_seconds", "regions", "mapped_bytes", "queued_steps", "last_step", "answered_steps", "cancelled_steps", "faulted_rows", "lost_reports", "lost_stamps")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNALLING_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_STEPS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_STEPS_FIELD_NUMBER: _ClassVar[int]
    FAULTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOST_REPORTS_FIELD_NUMBER: _ClassVar[int]
    LOST_STAMPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker: Worker
    placement: Placement
    signalling: Signalling
    configuration: EngineConfiguration
    lease_remaining_seconds: float
    regions: _containers.RepeatedScalarFieldContainer[str]
    mapped_bytes: int
    queued_steps: int
    last_step: int
    answered_steps: int
    cancelled_steps: int
    faulted_rows: int
    lost_reports: int
    lost_stamps: int
    def __init__(self, epoch: _Optional[int] = ..., worker: _Optional[_Union[Worker, _Mapping]] = ..., placement: _Optional[_Union[Placement, str]] = ..., signalling: _Optional[_Union[Signalling, str]] = ..., configuration: _Optional[_Union[EngineConfiguration, _Mapping]] = ..., lease_remaining_seconds: _Optional[float] = ..., regions: _Optional[_Iterable[str]] = ..., mapped_bytes: _Optional[int] = ..., queued_steps: _Optional[int] = ..., last_step: _Optional[int] = ..., answered_steps: _Optional[int] = ..., cancelled_steps: _Optional[int] = ..., faulted_rows: _Optional[int] = ..., lost_reports: _Optional[int] = ..., lost_stamps: _Optional[int] = ...) -> None: ...
