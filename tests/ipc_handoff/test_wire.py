"""Regions and geometries as the control contract writes them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.cuda_regions import CudaExport
from ipc_handoff.errors import RegionError
from ipc_handoff.layout import LAYOUT_VERSION
from ipc_handoff.regions import DTYPES, TensorSpec
from ipc_handoff.wire import (
    cuda_export,
    cuda_region,
    geometry_message,
    handoff_geometry,
    host_region,
    layout_message,
    region_spec,
)
from tests.ipc_handoff.properties import unhurried
from tests.ipc_handoff.support import GEOMETRY


def test_a_geometry_comes_back_with_the_same_fingerprint() -> None:
    message = pb.Geometry.FromString(geometry_message(GEOMETRY).SerializeToString())
    again = handoff_geometry(message, GEOMETRY.slots)
    assert again == GEOMETRY
    layout = layout_message(again)
    assert (layout.version, layout.fingerprint, layout.slots) == (
        LAYOUT_VERSION,
        GEOMETRY.fingerprint,
        GEOMETRY.slots,
    )


def test_a_geometry_message_has_every_field_set() -> None:
    named = {field.name for field, _ in geometry_message(GEOMETRY).ListFields()}
    assert named == set(pb.Geometry.DESCRIPTOR.fields_by_name)


@unhurried
@given(
    st.lists(st.integers(1, 2**14), min_size=1, max_size=4),
    st.sampled_from(list(DTYPES.values())),
    st.booleans(),
)
def test_a_region_comes_back_as_it_was(shape: list[int], dtype: torch.dtype, strided: bool) -> None:
    strides = tuple(range(len(shape), 0, -1)) if strided else ()
    spec = TensorSpec(tuple(shape), dtype, strides)
    region = host_region("k_cache/3", 17, spec, offset=64)
    region = pb.Region.FromString(region.SerializeToString())
    assert region_spec(region) == spec
    assert (region.name, region.host.token, region.host.offset) == ("k_cache/3", 17, 64)
    assert region.byte_size == spec.byte_size


def test_the_data_types_are_those_of_the_contract() -> None:
    contract = {name.removeprefix("DATA_TYPE_") for name in pb.DataType.keys()}  # noqa: SIM118
    assert contract - {"UNSPECIFIED"} == set(DTYPES)


@pytest.mark.parametrize("data_type", [0, 8, 99, -1])
def test_a_data_type_that_does_not_exist(data_type: int) -> None:
    region = pb.Region(name="answers", shape=[4])
    region.data_type = data_type  # type: ignore[assignment]
    with pytest.raises(RegionError, match=r"answers\.data_type: .*fix: one of UINT8"):
        region_spec(region)


@pytest.mark.parametrize(
    ("shape", "strides", "field"),
    [
        ([], [], "shape"),
        ([0], [], "shape"),
        ([-(2**63)], [], "shape"),
        ([2**63 - 1, 2**63 - 1], [], "shape"),
        ([2**63 - 1] * 1000, [0] * 1000, "shape"),
        ([2, 2], [1], "strides"),
        ([2, 2], [-(2**63), 1], "strides"),
    ],
)
def test_numbers_without_sense_name_their_field(
    shape: list[int], strides: list[int], field: str
) -> None:
    region = pb.Region(name="k_cache/0", shape=shape, strides=strides, data_type=pb.DATA_TYPE_UINT8)
    with pytest.raises(RegionError, match=rf"k_cache/0\.{field}.*fix: "):
        region_spec(region)


EXPORT = CudaExport(bytes(range(64)), 4096, 320, "GPU-1", 17)


def test_an_export_comes_back_as_it_was() -> None:
    spec = TensorSpec((10, 4), torch.uint8, (8, 1))
    region = cuda_region("k_cache/3", EXPORT, spec, offset=40)
    region = pb.Region.FromString(region.SerializeToString())
    assert region_spec(region) == spec
    assert cuda_export(region) == replace(EXPORT, offset=4136, byte_size=76)


@pytest.mark.parametrize(
    ("field", "value"), [("handle", b"x" * 63), ("gpu_uuid", ""), ("allocation", 0)]
)
def test_device_memory_without_its_parts_is_refused(field: str, value: object) -> None:
    region = cuda_region("answers", EXPORT, TensorSpec((320,), torch.uint8))
    setattr(region.cuda_ipc, field, value)
    with pytest.raises(RegionError, match=rf"^answers\.cuda_ipc\.{field}: .*\(fix: "):
        cuda_export(region)
