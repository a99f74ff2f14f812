#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"

// Tensors of safetensors files: eight bytes with the length of a JSON header, the header, the data.

namespace engine {

using Json = nlohmann::json;
namespace fs = std::filesystem;

// Runs `read`. Its errors get the file's name in front, those of the JSON library also `problem`.
template <typename Read>
auto InFile(const fs::path& file, const char* problem, const Read& read) {
  try {
    return read();
  } catch (const Json::exception& error) {
    throw nwor::Error(nwor::Concat(file.string(), ": ", problem, ": ", error.what()));
  } catch (const nwor::Error& error) {
    throw nwor::Error(nwor::Concat(file.string(), ": ", error.what()));
  }
}

// The whole of a JSON file. Throws nwor::Error that names the file.
Json ReadJson(const fs::path& file);

class Weights {
 public:
  // One file, or the files of a model's folder: model.safetensors, or all that
  // model.safetensors.index.json names. Throws nwor::Error when a file is cut short or damaged.
  explicit Weights(const fs::path& place);

  // Hands a tensor out, once; its sizes must be these. Throws nwor::Error. Those that some models
  // lack are not required: undefined then.
  at::Tensor Take(const std::string& name, const std::vector<int64_t>& sizes, bool required = true);
  std::map<std::string, at::Tensor> TakeAll() { return std::move(tensors_); }

  // Every tensor must have been taken: one that is left over belongs to a part of the model that
  // this engine does not compute.
  void ExpectNoneLeft() const;

  const Json& metadata() const { return metadata_; }

 private:
  void Add(const fs::path& file);

  const fs::path place_;  // for messages
  std::map<std::string, at::Tensor> tensors_;
  Json metadata_ = Json::object();
};

}  // namespace engine
