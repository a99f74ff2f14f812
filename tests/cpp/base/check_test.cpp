#include "base/check.h"

#include <gtest/gtest.h>

#include <locale>
#include <string>
#include <vector>

// How refusals are worded: by Concat, of whatever they name.

namespace nwor {
namespace {

TEST(Concat, PutsTextsNumbersAndListsBehindOneAnother) {
  const std::string name = "key";
  EXPECT_EQ(Concat(name, ": got ", 3, " of ", int64_t{-5}, 'x', std::string_view("y")),
            "key: got 3 of -5xy");
  EXPECT_EQ(Concat(uint8_t{7}, " ", true, " ", uint64_t{1} << 63), "7 1 9223372036854775808");
  EXPECT_EQ(Concat(0.5, " ", 1e-9F, " ", 3.0), "0.5 1e-09 3");
  EXPECT_EQ(Concat(std::vector<int64_t>{2, -3}, std::vector<int>{}), "[2, -3][]");
  EXPECT_EQ(Concat(), "");
}

TEST(Concat, WritesNumbersAlikeInAnyLocale) {
  struct Grouped : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale(), new Grouped));
  const std::string text = Concat("rows: got ", 1234567);
  std::locale::global(before);
  EXPECT_EQ(text, "rows: got 1234567");
}

TEST(Check, ThrowsWhatItIsGiven) {
  const auto refuse = [](int rows) { NWOR_CHECK(rows == 3, "key: got ", rows, ", expected 3"); };
  EXPECT_NO_THROW(refuse(3));
  try {
    refuse(4);
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "key: got 4, expected 3");
  }
}

}  // namespace
}  // namespace nwor
