#include "attention/verify_launch.cuh"

template void nwor::LaunchVerifyTyped<__nv_bfloat16, false, 128>(const VerifyArgs&,
                                                                 const VerifyConfig&);
