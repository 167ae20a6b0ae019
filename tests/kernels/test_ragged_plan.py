"""Which tiles ragged logits are cut into."""

import pytest

from indexer_service.kernels.mqa_logits import ragged_plan


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 300, 4096])
@pytest.mark.parametrize("tiles", [1, 16, 256, 5000])
@pytest.mark.parametrize("together", [1, 2, 8])
def test_programs_have_whole_groups_of_rows_and_few_enough(
    rows: int, tiles: int, together: int
) -> None:
    block_rows = ragged_plan.block_rows(rows, tiles, together, 396)
    assert block_rows % together == 0
    assert 0 < block_rows <= ragged_plan.MOST_BLOCK_ROWS


def test_programs_fill_the_gpu_evenly() -> None:
    assert ragged_plan.block_rows(4096, 256, 2, 396) == ragged_plan.MOST_BLOCK_ROWS
    programs = 16 * -(-4096 // ragged_plan.block_rows(4096, 16, 2, 396))
    assert -programs % 396 < 40  # places that stay empty at the end


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_few_keys_get_narrow_tiles_and_odd_heads_a_kernel_too(arch: int) -> None:
    few, many = (ragged_plan.chosen(arch, 64, 128, keys) for keys in (4096, 65536))
    assert few.keys <= many.keys
    assert ragged_plan.chosen(arch, 200, 128, 4096).form == "portable"
    assert ragged_plan.chosen(arch, 16, 256, 4096).form == "portable"
