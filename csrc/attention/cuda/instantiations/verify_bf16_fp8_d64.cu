#include "attention/cuda/verify_launch.cuh"

template struct nwor::VerifyLauncher<__nv_bfloat16, true, 64>;
