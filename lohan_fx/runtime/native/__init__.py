"""Kernels in C++, built once on the machine that runs them."""
