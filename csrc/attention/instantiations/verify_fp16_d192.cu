#include "attention/verify_launch.cuh"

template void nwor::LaunchVerifyTyped<__half, false, 192>(const VerifyArgs&, const VerifyConfig&);
