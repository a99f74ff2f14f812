#include <cstdio>

#include "build_info.h"
#include "kv_interceptor/interceptor.h"

int main() {
  const nwor::BuildInfo& info = nwor::GetBuildInfo();
  std::printf("%.*s %.*s %zu\n", static_cast<int>(info.version.size()), info.version.data(),
              static_cast<int>(info.torch.size()), info.torch.data(), sizeof(nwor::Interceptor));
  return 0;
}
