#include "attention/verify_launch.cuh"

template void nwor::LaunchVerifyTyped<__half, false, 64>(const VerifyArgs&, const VerifyConfig&);
