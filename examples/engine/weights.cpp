#include "weights.h"

#include <ATen/ops/empty.h>

#include <fstream>
#include <set>
#include <sstream>

#include "base/check.h"

namespace engine {
namespace {

namespace fs = std::filesystem;

std::optional<at::ScalarType> TypeOf(const std::string& name) {
  static const std::map<std::string, at::ScalarType> kTypes = {
      {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16},
      {"I64", at::kLong},  {"I32", at::kInt},
  };
  const auto found = kTypes.find(name);
  return found == kTypes.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace

Json ReadJson(const fs::path& file) {
  std::ifstream stream(file);
  std::stringstream text;
  NWOR_CHECK(!fs::is_directory(file) && stream && text << stream.rdbuf(), file.string(),
             ": cannot be read, expected a JSON file");
  try {
    return Json::parse(text.str());
  } catch (const Json::exception& error) {
    throw nwor::Error(nwor::Concat(file.string(), ": not JSON: ", error.what()));
  }
}

Weights Weights::FromFile(const fs::path& file) {
  Weights weights;
  weights.place_ = file;
  weights.Add(file);
  return weights;
}

Weights Weights::FromFolder(const fs::path& folder) {
  Weights weights;
  weights.place_ = folder;
  const fs::path index = folder / "model.safetensors.index.json";
  if (!fs::exists(index)) {
    weights.Add(folder / "model.safetensors");
    return weights;
  }
  std::set<std::string> files;
  try {
    const auto map = ReadJson(index).at("weight_map").get<std::map<std::string, std::string>>();
    for (const auto& entry : map) files.insert(entry.second);
  } catch (const Json::exception& error) {
    throw nwor::Error(nwor::Concat(index.string(), ": no index of files: ", error.what()));
  }
  for (const std::string& file : files) weights.Add(folder / file);
  return weights;
}

void Weights::Add(const fs::path& file) {
  std::error_code missing;
  const auto size = static_cast<int64_t>(fs::file_size(file, missing));
  std::ifstream stream(file, std::ios::binary);
  NWOR_CHECK(!missing && stream, file.string(), ": cannot be read, expected a safetensors file");
  uint64_t length = 0;
  stream.read(reinterpret_cast<char*>(&length), sizeof(length));
  NWOR_CHECK(stream && length <= static_cast<uint64_t>(size) - sizeof(length), file.string(),
             ": not a readable safetensors file: its header does not fit the file");
  std::string text(length, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(length));
  const int64_t data = static_cast<int64_t>(sizeof(length) + length);
  try {
    const Json header = Json::parse(text);
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        metadata_ = entry;
        continue;
      }
      const auto dtype = TypeOf(entry.at("dtype").get<std::string>());
      NWOR_CHECK(dtype, file.string(), ": tensor ", name, " has type ", entry.at("dtype").dump(),
                 ", expected F32, F16, BF16, I64 or I32");
      const auto sizes = entry.at("shape").get<std::vector<int64_t>>();
      const auto [begin, end] = entry.at("data_offsets").get<std::pair<int64_t, int64_t>>();
      int64_t bytes = static_cast<int64_t>(c10::elementSize(*dtype));
      for (const int64_t one : sizes) {
        NWOR_CHECK(one >= 0 && (one == 0 || bytes <= size / one), file.string(), ": tensor ", name,
                   " has sizes ", sizes, ", more than the file holds");
        bytes *= one;
      }
      NWOR_CHECK(begin >= 0 && end - begin == bytes && end <= size - data, file.string(),
                 ": tensor ", name, " has bytes ", begin, " to ", end, ", expected ", bytes,
                 " bytes inside the file");
      const at::Tensor tensor = at::empty(sizes, at::TensorOptions(*dtype));
      stream.seekg(data + begin);
      stream.read(static_cast<char*>(tensor.data_ptr()), bytes);
      NWOR_CHECK(stream, file.string(), ": tensor ", name, " cannot be read");
      tensors_[name] = tensor;
    }
  } catch (const Json::exception& error) {
    throw nwor::Error(
        nwor::Concat(file.string(), ": not a readable safetensors file: ", error.what()));
  }
}

std::optional<at::Tensor> Weights::TakeIf(const std::string& name,
                                          const std::vector<int64_t>& sizes) {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return std::nullopt;
  const at::Tensor tensor = found->second;
  bool fits = tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = sizes[i] == -1 || sizes[i] == tensor.size(static_cast<int64_t>(i));
  }
  NWOR_CHECK(fits, place_.string(), ": tensor ", name, " has sizes ", tensor.sizes(), ", expected ",
             sizes);
  tensors_.erase(found);
  return tensor;
}

at::Tensor Weights::Take(const std::string& name, const std::vector<int64_t>& sizes) {
  const auto found = TakeIf(name, sizes);
  NWOR_CHECK(found, place_.string(), ": no tensor ", name, ", expected one of sizes ", sizes);
  return *found;
}

void Weights::ExpectNoneLeft() const {
  NWOR_CHECK(tensors_.empty(), place_.string(), ": tensor ", tensors_.begin()->first, " and ",
             tensors_.size() - 1, " more are unknown, expected those of a Llama or Qwen2 model");
}

}  // namespace engine
