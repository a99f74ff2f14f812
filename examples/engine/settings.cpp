#include "settings.h"

#include <yaml-cpp/yaml.h>

#include <functional>
#include <limits>
#include <map>
#include <set>

#include "base/check.h"
#include "session/draft_tree.h"
#include "weights.h"

namespace engine {
namespace {

// Sets one field from a value, or throws nwor::Error.
using Setter = std::function<void(const std::string& key, const Json& value)>;

void Expect(bool right, const std::string& key, const Json& value, const std::string& expected) {
  NWOR_CHECK(right, key, ": got ", value.dump(), ", expected ", expected);
}

Setter Flag(bool* field) {
  return [field](const std::string& key, const Json& value) {
    Expect(value.is_boolean(), key, value, "true or false");
    *field = value.get<bool>();
  };
}

Setter Whole(int64_t* field, int64_t low, int64_t high = std::numeric_limits<int64_t>::max()) {
  return [=](const std::string& key, const Json& value) {
    const bool whole = value.is_number_integer() && value >= low && value <= high;
    Expect(whole, key, value, nwor::Concat("a whole number, ", low, " to ", high));
    *field = value.get<int64_t>();
  };
}

Setter Number(double* field, double low, double high) {
  return [=](const std::string& key, const Json& value) {
    Expect(value.is_number() && value >= low && value <= high, key, value,
           nwor::Concat("a number, ", low, " to ", high));
    *field = value.get<double>();
  };
}

Setter Text(std::string* field) {
  return [=](const std::string& key, const Json& value) {
    Expect(value.is_string(), key, value, "text");
    *field = value.get<std::string>();
  };
}

template <typename Enum, size_t kCount>
Setter Choice(Enum* field, const std::array<std::string_view, kCount>& names) {
  return [field, &names](const std::string& key, const Json& value) {
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    *field = nwor::ParseChoice<Enum>(key, text, names);
  };
}

// Names that other engines' files have for the same things.
const std::map<std::string, std::string> kAliases = {
    {"enable_eagle_target_tree", "enable_target_tree"},
    {"spec_method", "method"},
    {"model", "head"},
    {"max_decoding_tokens", "tree_rows"},
    {"max_path_len", "tree_depth"},
    {"enable_partial_kv", "enable_specpv"},
    {"partial_kv_threshold", "specpv_partial_threshold"},
    {"specpv_retrieval_blocks", "specpv_n_retrieval_blocks"},
    {"specpv_full_refresh_steps", "specpv_full_refresh_interval"},
};

// Every key of a file or of the command line.
std::map<std::string, Setter> Setters(Settings* s) {
  nwor::SpecPVConfig* p = &s->specpv;
  const int64_t tokens = int64_t{1} << 31, blocks = int64_t{1} << 20;
  return {
      {"device", Text(&s->device)},
      {"dtype", Text(&s->dtype)},
      {"max_new_tokens", Whole(&s->max_new_tokens, 1, tokens)},
      {"max_batch_size", Whole(&s->max_batch_size, 1, 4096)},
      {"cache_tokens", Whole(&s->cache_tokens, 0, tokens * 16)},
      {"page_size", Whole(&s->page_size, 1, 1024)},
      {"prefill_rows", Whole(&s->prefill_rows, 1, nwor::kMaxTreeRows)},
      {"check_contract", Flag(&s->check_contract)},
      {"break_contract", Whole(&s->break_contract, -1)},
      {"ignore_eos", Flag(&s->ignore_eos)},
      {"temperature", Number(&s->sampling.temperature, 0, 1e6)},
      {"top_k", Whole(&s->sampling.top_k, 0, tokens - 1)},
      {"top_p", Number(&s->sampling.top_p, 1e-6, 1)},
      {"seed", Whole(&s->seed, 0)},
      {"enable_speculative_decoding", Flag(&s->enable_speculative_decoding)},
      {"method", Choice(&s->method, kMethodNames)},
      {"enable_target_tree", Flag(&s->enable_target_tree)},
      {"head", Text(&s->head)},
      {"tree_rows", Whole(&s->tree.rows, 1, nwor::kMaxTreeRows)},
      {"tree_depth", Whole(&s->tree.depth, 1, 32)},
      {"tree_top_k", Whole(&s->tree.top_k, 1, 10)},
      {"strict", Flag(&s->nwor.strict)},
      {"staging_rows", Whole(&s->nwor.staging_rows, 0)},
      {"max_staging_bytes", Whole(&s->nwor.max_staging_bytes, 1)},
      {"enable_specpv", Flag(&p->enable_specpv)},
      {"specpv_block_size", Whole(&p->specpv_block_size, 1, nwor::kMaxBlockSize)},
      {"specpv_n_sink_blocks", Whole(&p->specpv_n_sink_blocks, 0, blocks)},
      {"specpv_n_retrieval_blocks", Whole(&p->specpv_n_retrieval_blocks, 0, blocks)},
      {"specpv_n_window_blocks", Whole(&p->specpv_n_window_blocks, 0, blocks)},
      {"specpv_n_spec_tokens_buf", Whole(&p->specpv_n_spec_tokens_buf, 0, tokens)},
      {"specpv_partial_threshold", Whole(&p->specpv_partial_threshold, 0, tokens)},
      {"specpv_full_refresh_interval", Whole(&p->specpv_full_refresh_interval, 0, tokens)},
      {"specpv_selector", Choice(&p->specpv_selector, nwor::kSelectorNames)},
      {"specpv_score", Choice(&p->specpv_score, nwor::kScoreNames)},
      {"specpv_query_reduce", Choice(&p->specpv_query_reduce, nwor::kQueryReduceNames)},
      {"specpv_group_reduce", Choice(&p->specpv_group_reduce, nwor::kGroupReduceNames)},
      {"specpv_selection", Choice(&p->specpv_selection, nwor::kSelectionNames)},
      {"specpv_mode", Choice(&p->specpv_mode, nwor::kSpecPVModeNames)},
      {"specpv_budget", Choice(&p->specpv_budget, nwor::kBudgetRuleNames)},
  };
}

// A plain scalar of YAML by its looks: true, 12, 0.5, else text. Quoted ones are text.
Json Scalar(const YAML::Node& node) {
  bool flag = false;
  int64_t whole = 0;
  double number = 0;
  if (node.Tag() != "!") {
    if (YAML::convert<int64_t>::decode(node, whole)) return whole;
    if (YAML::convert<double>::decode(node, number)) return number;
    if (YAML::convert<bool>::decode(node, flag)) return flag;
  }
  return node.Scalar();
}

std::string OwnName(const std::string& key) {
  const auto alias = kAliases.find(key);
  return alias == kAliases.end() ? key : alias->second;
}

void Apply(const std::map<std::string, Setter>& setters, const std::string& key,
           const Json& value) {
  const auto setter = setters.find(OwnName(key));
  if (setter == setters.end()) {
    std::vector<std::string> valid;
    for (const auto& [name, unused] : setters) valid.push_back(name);
    throw nwor::Error(nwor::Concat("unknown key '", key, "', expected one of ", valid));
  }
  setter->second(key, value);
}

// Applies the keys of a mapping; speculative_config is opened, once.
void ApplyAll(const std::map<std::string, Setter>& setters, const YAML::Node& node, bool nested,
              std::set<std::string>* seen) {
  NWOR_CHECK(node.IsMap(), nested ? "speculative_config: " : "",
             "got no mapping, expected keys and values");
  for (const auto& entry : node) {
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "?";
    NWOR_CHECK(seen->insert(OwnName(key)).second, key, ": stands there twice, expected it once");
    if (!nested && key == "speculative_config") {
      ApplyAll(setters, entry.second, true, seen);
    } else {
      NWOR_CHECK(entry.second.IsScalar(), key, ": got no single value, expected one");
      Apply(setters, key, Scalar(entry.second));
    }
  }
}

}  // namespace

void Settings::ReadFile(const std::filesystem::path& file) {
  const std::string kind = file.extension().string();
  NWOR_CHECK(kind == ".json" || kind == ".yaml" || kind == ".yml", "--config: got '", file.string(),
             "', expected a name that ends in .yaml, .yml or .json");
  if (kind == ".json") ReadJson(file);  // JSON is YAML too: what follows serves both
  InFile(file, "", [&] {
    try {
      const YAML::Node content = YAML::LoadFile(file.string());
      std::set<std::string> seen;
      if (!content.IsNull()) ApplyAll(Setters(this), content, /*nested=*/false, &seen);
    } catch (const YAML::BadFile&) {
      throw nwor::Error("cannot be read");
    } catch (const YAML::Exception& error) {
      throw nwor::Error(nwor::Concat("not YAML: ", error.what()));
    }
  });
}

void Settings::Set(const std::string& key, const std::string& text) {
  Apply(Setters(this), key, Scalar(YAML::Node(text)));
}

void Settings::Validate() const {
  NWOR_CHECK(device == "cpu" || device == "cuda" || device.starts_with("cuda:"), "device: got '",
             device, "', expected cpu, cuda or cuda:<number>");
  NWOR_CHECK(method != Method::kEagle3 || !speculating() || !head.empty(),
             "head: got none, expected the file of an EAGLE3 head for method 'eagle3'");
  if (!specpv.enable_specpv) return;
  specpv.Validate();
  const int64_t tail = nwor::ChooseBudget(specpv, tree.rows).tail_capacity;
  NWOR_CHECK(tail + tree.rows <= nwor::kMaxTreeRows, "specpv_n_spec_tokens_buf: got ",
             specpv.specpv_n_spec_tokens_buf, " beside trees of ", tree.rows,
             " rows, expected a tail and a tree of at most ", nwor::kMaxTreeRows,
             " rows together, which a full step runs in one piece; they have ", tail + tree.rows);
}

}  // namespace engine
