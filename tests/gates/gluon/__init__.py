"""Gluon kernels run without a GPU: the same Python, numpy tensors, and a watch on shared memory.

Triton's interpreter does not know Gluon. Here a kernel's functions run as Python (`names`), with
Triton's own rules for types and layouts (`semantic`, `layouts`) over numpy operations (`builder`).
Values in shared memory arrive at once; what a kernel may rely on is decided by order alone
(`memory`, `warps`): an access that no wait, barrier or fence orders after another one is an error,
whether or not this run would have seen a wrong value. Groups of warps run in turns (`turns`).

Not seen: bank conflicts, registers, whether layouts compile (the compiler's gate sees that), a
missing barrier between a load and a store of the same warps, which Triton places by itself, and
the 13 bits to which SM90 sums products of e4m3.
"""
