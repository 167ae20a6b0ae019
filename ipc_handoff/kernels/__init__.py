"""The kernels that write and read the words of the hand-over: the worker's and the service's."""
