#include "attention/cuda/launch.cuh"

template struct nwor::VerifyLauncher<__nv_bfloat16, false, 256>;
