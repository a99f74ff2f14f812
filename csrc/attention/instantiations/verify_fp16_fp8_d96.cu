#include "attention/verify_launch.cuh"

template void nwor::LaunchVerifyTyped<__half, true, 96>(const VerifyArgs&, const VerifyConfig&);
