"""Parts of tools/gpu_tests.py and tools/gpu_benchmarks.py."""
