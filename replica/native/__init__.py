"""PURE. The CPU kernels: C++ behind a plain C interface, compiled on the machine that runs them."""
