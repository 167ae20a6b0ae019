"""Names of `cuda.bindings.driver` that the code under test uses."""

from enum import IntEnum


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


class CUpointer_attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_BUFFER_ID = 7
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10
    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133


class CUstream_flags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUipcMem_flags(IntEnum):
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1


class CUipcMemHandle:
    reserved = bytes(64)
