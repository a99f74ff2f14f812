#include "attention/cuda/verify_launch.cuh"

template struct nwor::VerifyLauncher<__half, true, 80>;
