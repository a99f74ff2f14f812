#pragma once

// Marks functions that kernels and host code share, so that both compute the same by construction.
#ifdef __CUDACC__
#define NWOR_HOST_DEVICE __host__ __device__
#else
#define NWOR_HOST_DEVICE
#endif
