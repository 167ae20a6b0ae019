"""Gluon kernels run without a GPU: the same Python, numpy tensors, and a watch on shared memory.

Triton's interpreter does not know Gluon. Here a kernel's functions run as Python (`names`), with
Triton's own rules for types and layouts (`semantic`, `layouts`) over numpy operations (`builder`).
Values in shared memory arrive at once; what a kernel may rely on is decided by order alone
(`memory`, `warps`): an access that no wait, barrier or fence orders after another one is an error,
whether or not this run would have seen a wrong value. Groups of warps run in turns (`turns`).

Not seen: registers, bank conflicts, whether layouts compile (the compiler's gate sees that), and
the 13 bits to which SM90 sums products of e4m3. A barrier between loads and stores of the same
warps, and between products that they waited for and stores, may be missing: Triton 3.6 places
those itself, as its PTX shows. (It does so behind `wait_group`, too; here that is asked for.)
"""
