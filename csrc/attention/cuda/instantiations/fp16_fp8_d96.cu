#include "attention/cuda/launch.cuh"

template struct nwor::VerifyLauncher<__half, true, 96>;
