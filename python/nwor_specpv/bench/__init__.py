"""Benchmarks with peers in the same process: `nwor-specpv bench NAME`."""
