#include "attention/verify_launch.cuh"

template void nwor::LaunchVerifyTyped<__nv_bfloat16, false, 80>(const VerifyArgs&,
                                                                const VerifyConfig&);
