"""How the fp8 kernel for SM90 lays out what its warps hold."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.constexpr_function
def groups(warps):
    """Warpgroups that compute: each has a part of the heads' scores, of the output's columns."""
    return warps // 4


@gluon.constexpr_function
def scores_layout(block_heads, warps, depth=16):
    """[64 tokens, heads]; depth: of an instruction, in elements."""
    shape = [16, block_heads // groups(warps), depth]
    return gl.NVMMADistributedLayout([3, 0], [4, groups(warps)], shape)


@gluon.constexpr_function
def output_layout(block_heads, warps):
    """[64 columns a warpgroup, heads]"""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_heads, 32])


@gluon.constexpr_function
def stored_columns(block_heads, warps):
    """As `_columns` leaves them, pairs first, so that stores are pairs."""
    heads = [[0, 1], *([0, 8 << i] for i in range(block_heads.bit_length() - 4))]
    groups = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1, 0], *heads], [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]], groups, [],
        [16 * warps, block_heads],
    )  # fmt: skip


@gluon.constexpr_function
def transposed(warps):
    """How codes are read for the output, two at a time, [64 pairs of columns, 64 tokens]: as one
    piece, or (four warps) two."""
    pieces = [[32, 0]] if warps == 4 else []
    groups = [[8 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32], *pieces],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], groups, [], [64, 64],
    )  # fmt: skip


@gluon.constexpr_function
def everywhere(warps):
    """A block's scales [64, 4], the same in every warp."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[0, 0]] * (warps.bit_length() - 1), [], [64, 4],
    )  # fmt: skip
