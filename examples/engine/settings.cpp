#include "settings.h"

#include <yaml-cpp/yaml.h>

#include <map>
#include <set>

#include "session/draft_tree.h"
#include "weights.h"

// The settings as one flat JSON object. A choice is its name there.
#define ENGINE_CHOICE(Enum)                                                                        \
  void to_json(engine::Json& json, Enum value) { json = nwor::ChoiceName(value, k##Enum##Names); } \
  void from_json(const engine::Json& json, Enum& value) {                                          \
    value = nwor::ParseChoice<Enum>("", json.get<std::string>(), k##Enum##Names);                  \
  }

namespace nwor {

ENGINE_CHOICE(Selector)
ENGINE_CHOICE(Score)
ENGINE_CHOICE(QueryReduce)
ENGINE_CHOICE(GroupReduce)
ENGINE_CHOICE(Selection)
ENGINE_CHOICE(SpecPVMode)
ENGINE_CHOICE(BudgetRule)

}  // namespace nwor

namespace engine {

ENGINE_CHOICE(Method)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(
    Settings, device, cuda_graphs, max_new_tokens, max_batch_size, cache_tokens, page_size,
    prefill_rows, check_contract, break_contract, ignore_eos, seed, temperature, top_k, top_p,
    enable_speculative_decoding, method, enable_target_tree, head, tree_rows, tree_depth,
    tree_top_k, strict, staging_rows, max_staging_bytes, enable_specpv, specpv_block_size,
    specpv_n_sink_blocks, specpv_n_retrieval_blocks, specpv_n_window_blocks,
    specpv_n_spec_tokens_buf, specpv_partial_threshold, specpv_full_refresh_interval,
    specpv_selector, specpv_score, specpv_query_reduce, specpv_group_reduce, specpv_selection,
    specpv_mode, specpv_budget)

namespace {

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

// Numbers that may not be just anything from 0 to 2^31.
const std::pair<Json, Json> kAnyRange = {0, int64_t{1} << 31};
const std::map<std::string, std::pair<Json, Json>> kRanges = {
    {"max_new_tokens", {1, int64_t{1} << 31}},
    {"max_batch_size", {1, 4096}},
    {"cache_tokens", {0, int64_t{1} << 35}},
    {"page_size", {1, 1024}},
    {"prefill_rows", {1, nwor::kMaxTreeRows}},
    {"seed", {0, INT64_MAX}},
    {"top_p", {0.000001, 1}},
    {"tree_rows", {1, nwor::kMaxTreeRows}},
    {"tree_depth", {1, 32}},
    {"tree_top_k", {1, 10}},
    {"max_staging_bytes", {1, INT64_MAX}}};

std::string OwnName(const std::string& key) {
  const auto alias = kAliases.find(key);
  return alias == kAliases.end() ? key : alias->second;
}

// The value must be of the kind that stands there now.
void Put(const std::string& key, const Json& value, Settings* settings) {
  Json all = *settings;
  const auto field = all.find(OwnName(key));
  if (field == all.end()) {
    std::string valid;
    for (const auto& entry : all.items()) valid += (valid.empty() ? "" : ", ") + entry.key();
    throw nwor::Error(nwor::Concat("unknown key '", key, "', expected one of ", valid));
  }
  bool right = field->is_boolean() ? value.is_boolean() : value.is_string();
  std::string expected = field->is_boolean() ? "true or false" : "text";
  if (field->is_number()) {
    const bool whole = field->is_number_integer(), listed = kRanges.contains(field.key());
    const auto& [low, high] = listed ? kRanges.at(field.key()) : kAnyRange;
    right =
        (whole ? value.is_number_integer() : value.is_number()) && low <= value && value <= high;
    expected = nwor::Concat(whole ? "a whole" : "a", " number, ", low.dump(), " to ", high.dump());
  }
  NWOR_CHECK(right, key, ": got ", value.dump(), ", expected ", expected);
  *field = value;
  try {
    all.get_to(*settings);
  } catch (const nwor::Error& error) {  // a name that is no choice
    throw nwor::Error(key + error.what());
  }
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

// Takes the keys of a mapping; speculative_config is opened, once.
void PutAll(const YAML::Node& node, bool nested, std::set<std::string>* seen, Settings* settings) {
  NWOR_CHECK(node.IsMap(), nested ? "speculative_config: " : "",
             "got no mapping, expected keys and values");
  for (const auto& entry : node) {
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "?";
    NWOR_CHECK(seen->insert(OwnName(key)).second, key, ": stands there twice, expected it once");
    if (!nested && key == "speculative_config") {
      PutAll(entry.second, true, seen, settings);
    } else {
      NWOR_CHECK(entry.second.IsScalar(), key, ": got no single value, expected one");
      Put(key, Scalar(entry.second), settings);
    }
  }
}

}  // namespace

void Settings::ReadFile(const std::filesystem::path& file) {
  if (file.extension() == ".json") ReadJson(file);  // JSON is YAML too: what follows serves both
  InFile(file, "", [&] {
    try {
      const YAML::Node content = YAML::LoadFile(file.string());
      std::set<std::string> seen;
      if (!content.IsNull()) PutAll(content, /*nested=*/false, &seen, this);
    } catch (const YAML::BadFile&) {
      throw nwor::Error("cannot be read");
    } catch (const YAML::Exception& error) {
      throw nwor::Error(nwor::Concat("not YAML: ", error.what()));
    }
  });
}

void Settings::Set(const std::string& key, const std::string& text) {
  Put(key, Scalar(YAML::Node(text)), this);
}

void Settings::Validate() const {
  NWOR_CHECK(device == "cpu" || device == "cuda" || device.starts_with("cuda:"), "device: got '",
             device, "', expected cpu, cuda or cuda:<number>");
  NWOR_CHECK(method != Method::kEagle3 || !speculating() || !head.empty(),
             "head: got none, expected the file of an EAGLE3 head for method 'eagle3'");
  if (!enable_specpv) return;
  SpecPVConfig::Validate();
  const int64_t tail = nwor::ChooseBudget(*this, tree_rows).tail_capacity;
  NWOR_CHECK(tail + tree_rows <= nwor::kMaxTreeRows, "specpv_n_spec_tokens_buf: got ",
             specpv_n_spec_tokens_buf, " beside trees of ", tree_rows,
             " rows, expected a tail and a tree of at most ", nwor::kMaxTreeRows,
             " rows together, which a full step runs in one piece; they have ", tail + tree_rows);
}

}  // namespace engine
