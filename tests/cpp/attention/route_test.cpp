#include "attention/routes/route.h"

#include <gtest/gtest.h>

namespace nwor {
namespace {

RouteAvailability With(std::initializer_list<Route> routes) {
  RouteAvailability available;
  for (const Route route : routes) available.Set(route, true);
  return available;
}

RouteAvailability Everything() {
  return With({Route::kCpu, Route::kCuda, Route::kTorchFlash, Route::kFlash2, Route::kFlash3});
}

RouteRequest OnCuda() {
  RouteRequest request;
  request.cuda = true;
  return request;
}

TEST(Route, CpuTensorsStayOnTheCpu) {
  RouteRequest request;
  request.dtype = request.cache_dtype = DType::kFloat32;
  request.tree_mask = request.window = request.softcap = true;
  request.max_rows = 5000;
  request.head_dim = 72;
  request.page_size = 5;
  const RouteChoice choice = ChooseRoute(request, Everything());
  ASSERT_TRUE(choice.ok) << choice.reason;
  EXPECT_EQ(choice.route, Route::kCpu);
}

TEST(Route, VerificationRowsTakeOurKernels) {
  for (const int rows : {1, 8, 256}) {
    RouteRequest request = OnCuda();
    request.max_rows = rows;
    request.tree_mask = rows > 1;
    EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kCuda) << rows;
  }
}

TEST(Route, PrefillTakesTheFastestFlashAttentionThatIsThere) {
  RouteRequest request = OnCuda();
  request.max_rows = 257;
  EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kFlash3);
  EXPECT_EQ(ChooseRoute(request, With({Route::kCuda, Route::kTorchFlash, Route::kFlash2})).route,
            Route::kFlash2);
  EXPECT_EQ(ChooseRoute(request, With({Route::kCuda, Route::kTorchFlash})).route,
            Route::kTorchFlash);
  EXPECT_EQ(ChooseRoute(request, With({Route::kCuda})).route, Route::kCuda);
}

TEST(Route, OnlyTheRequestsThatArePrefillLeaveOurKernels) {
  RouteRequest request = OnCuda();
  request.max_rows = 257;  // of which the device may know fewer, even of a single request
  const RouteChoice choice = ChooseRoute(request, Everything());
  EXPECT_EQ(choice.route, Route::kFlash3);
  EXPECT_TRUE(choice.only_prefill);
  EXPECT_NE(choice.reason.find("requests of fewer take cuda"), std::string::npos);
  // By name a route has them all, and so it has what our kernels do not serve.
  EXPECT_FALSE(ChooseRoute(request, Everything(), "flash_attn_3").only_prefill);
  request.head_dim = 72;
  EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kFlash3);
  EXPECT_FALSE(ChooseRoute(request, Everything()).only_prefill);
  request.head_dim = 128;
  request.max_rows = 256;
  EXPECT_FALSE(ChooseRoute(request, Everything()).only_prefill);
  request.max_rows = 257;
  request.num_requests = 0;
  EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kCuda);
}

TEST(Route, PagesThatFlashAttention3WouldReadToTheirEndAreNotLeftToIt) {
  RouteRequest request = OnCuda();
  request.max_rows = 257;
  request.page_size = 64;
  EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kFlash3);
  request.page_size = 128;
  EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kFlash2);
  EXPECT_EQ(ChooseRoute(request, With({Route::kCuda, Route::kFlash3})).route, Route::kCuda);
  EXPECT_EQ(ChooseRoute(request, Everything(), "flash_attn_3").route, Route::kFlash3);
}

TEST(Route, PrefillThatFlashAttentionCannotServeTakesOurKernels) {
  for (bool RouteRequest::*feature : {&RouteRequest::window, &RouteRequest::compact_view}) {
    RouteRequest request = OnCuda();
    request.max_rows = 1000;
    request.*feature = true;
    EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kCuda);
  }
  RouteRequest request = OnCuda();
  request.max_rows = 1000;
  request.cache_dtype = DType::kFloat8E4M3;
  EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kCuda);
}

TEST(Route, LargeTablesAreNotGatheredBehindTheCallersBack) {
  RouteRequest request = OnCuda();
  request.max_rows = 1000;
  const RouteAvailability available = With({Route::kCuda, Route::kTorchFlash});
  request.table_bytes = kMaxGatheredBytes;
  EXPECT_EQ(ChooseRoute(request, available).route, Route::kTorchFlash);
  request.table_bytes = kMaxGatheredBytes + 1;
  EXPECT_EQ(ChooseRoute(request, available).route, Route::kCuda);
}

TEST(Route, PagesMustFitTheInstalledFlashAttention) {
  RouteRequest request = OnCuda();
  request.max_rows = 1000;
  RouteAvailability available = With({Route::kCuda, Route::kFlash2});
  available.page_multiple[static_cast<int>(Route::kFlash2)] = 256;
  EXPECT_EQ(ChooseRoute(request, available).route, Route::kCuda);
  request.page_size = 512;
  EXPECT_EQ(ChooseRoute(request, available).route, Route::kFlash2);
}

TEST(Route, AWantedRouteIsTakenOrRefusedButNeverReplaced) {
  RouteRequest request = OnCuda();
  EXPECT_EQ(ChooseRoute(request, Everything(), "torch_flash").route, Route::kTorchFlash);
  EXPECT_EQ(ChooseRoute(request, Everything(), "auto").route, Route::kCuda);
  EXPECT_FALSE(ChooseRoute(request, With({Route::kCuda}), "torch_flash").ok);
  EXPECT_FALSE(ChooseRoute(request, Everything(), "cpu").ok);
  request.block_size = 16;
  EXPECT_FALSE(ChooseRoute(request, Everything(), "flash_attn_3").ok);
  const RouteChoice unknown = ChooseRoute(request, Everything(), "triton");
  EXPECT_FALSE(unknown.ok);
  EXPECT_NE(unknown.reason.find("got 'triton', expected auto"), std::string::npos);
}

TEST(Route, FlashAttentionLeavesTreesToOurKernelsAndNeedsThem) {
  RouteRequest request = OnCuda();
  request.tree_mask = true;
  EXPECT_TRUE(ChooseRoute(request, With({Route::kCuda, Route::kFlash3}), "flash_attn_3").ok);
  EXPECT_FALSE(ChooseRoute(request, With({Route::kFlash3}), "flash_attn_3").ok);
}

TEST(Route, AnUnsupportedRequestGetsTheTableOfFeatures) {
  RouteRequest request = OnCuda();
  request.dtype = request.cache_dtype = DType::kFloat32;
  request.head_dim = 72;
  request.window = true;
  const RouteChoice choice = ChooseRoute(request, With({Route::kCpu, Route::kCuda}));
  ASSERT_FALSE(choice.ok);
  for (const char* text :
       {"required: cuda tensors, float32 rows, head size 72, page size 16, pages, window",
        "cuda: supports cuda tensors, page size 16, pages, window; missing float32 rows, head size "
        "72",
        "flash_attn_3 (absent): supports", "cpu: supports"}) {
    EXPECT_NE(choice.reason.find(text), std::string::npos) << text << "\n in\n" << choice.reason;
  }
}

TEST(Route, EveryFeatureIsServedBySomeRouteAndNamed) {
  for (int i = 0; i < kNumRouteFeatures; ++i) {
    EXPECT_NE(std::string(Name(static_cast<RouteFeature>(i))), "");
  }
  RouteRequest request = OnCuda();
  request.aligned = false;
  EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kTorchFlash);
  request.tree_mask = true;
  const RouteChoice refused = ChooseRoute(request, Everything());
  EXPECT_FALSE(refused.ok);
  EXPECT_NE(refused.reason.find("expected 16-byte alignment"), std::string::npos) << refused.reason;
  request.aligned = true;
  request.cache_dtype = DType::kFloat8E4M3;
  request.block_size = 32;
  request.page_size = 64;
  request.tree_mask = request.softcap = true;
  EXPECT_EQ(ChooseRoute(request, Everything()).route, Route::kCuda);
}

}  // namespace
}  // namespace nwor
