"""Kernels in C for a CPU, compiled where there is a compiler; each beside its plain twin."""
