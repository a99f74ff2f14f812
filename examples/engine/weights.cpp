#include "weights.h"

#include <ATen/ops/from_file.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <set>

namespace engine {

Json ReadJson(const fs::path& file) {
  return InFile(file, "not JSON", [&] {
    std::ifstream stream(file);
    NWOR_CHECK(!fs::is_directory(file) && stream, "cannot be read, expected a JSON file");
    return Json::parse(stream);
  });
}

Weights::Weights(const fs::path& place) : place_(place) {
  const fs::path index = place / "model.safetensors.index.json";
  if (!fs::is_directory(place)) {
    Add(place);
  } else if (!fs::exists(index)) {
    Add(place / "model.safetensors");
  } else {
    const Json json = ReadJson(index);
    const auto file_of = InFile(index, "no index of files", [&] {
      return json.at("weight_map").get<std::map<std::string, std::string>>();
    });
    std::set<std::string> files;
    for (const auto& [name, file] : file_of) files.insert(file);
    for (const std::string& file : files) Add(place / file);
  }
}

void Weights::Add(const fs::path& file) {
  static const std::map<std::string, at::ScalarType> kTypes = {
      {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16},
      {"I64", at::kLong},  {"I32", at::kInt},
  };
  InFile(file, "not a readable safetensors file", [&] {
    std::error_code missing;
    const auto size = static_cast<int64_t>(fs::file_size(file, missing));
    NWOR_CHECK(!missing && std::ifstream(file), "cannot be read, expected a safetensors file");
    uint64_t length = 0;
    const int64_t text = sizeof(length);  // where the header begins
    NWOR_CHECK(size >= text, "not a readable safetensors file: it has no header");
    // The file is mapped, not read.
    const at::Tensor bytes = at::from_file(file.string(), /*shared=*/false, size, at::kByte);
    const auto* memory = static_cast<const char*>(bytes.data_ptr());
    std::memcpy(&length, memory, sizeof(length));
    NWOR_CHECK(length <= static_cast<uint64_t>(size - text),
               "not a readable safetensors file: its header does not fit the file");
    const int64_t data = text + static_cast<int64_t>(length);
    const Json header = Json::parse(memory + text, memory + data);
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        metadata_ = entry;
        continue;
      }
      const auto type = kTypes.find(entry.at("dtype").get<std::string>());
      NWOR_CHECK(type != kTypes.end(), "tensor ", name, " has type ", entry.at("dtype").dump(),
                 ", expected F32, F16, BF16, I64 or I32");
      const auto sizes = entry.at("shape").get<std::vector<int64_t>>();
      const auto [begin, end] = entry.at("data_offsets").get<std::pair<int64_t, int64_t>>();
      auto expected = static_cast<double>(c10::elementSize(type->second));  // never overflows
      for (const int64_t one : sizes) expected *= one < 0 ? NAN : static_cast<double>(one);
      NWOR_CHECK(begin >= 0 && begin <= end && end <= size - data &&
                     static_cast<double>(end - begin) == expected,
                 "tensor ", name, " has bytes ", begin, " to ", end, ", expected ", expected,
                 " bytes inside the file");
      const at::Tensor own = bytes.slice(0, data + begin, data + end).clone();  // aligned
      tensors_[name] = own.view(type->second).view(sizes);
    }
  });
}

at::Tensor Weights::Take(const std::string& name, const std::vector<int64_t>& sizes,
                         bool required) {
  const auto found = tensors_.extract(name);
  NWOR_CHECK(found || !required, place_.string(), ": no tensor ", name, ", expected one of sizes ",
             sizes);
  if (!found) return {};
  const at::Tensor tensor = found.mapped();
  NWOR_CHECK(tensor.sizes() == sizes, place_.string(), ": tensor ", name, " has sizes ",
             tensor.sizes(), ", expected ", sizes);
  return tensor;
}

void Weights::ExpectNoneLeft() const {
  NWOR_CHECK(tensors_.empty(), place_.string(), ": tensor ", tensors_.begin()->first, " and ",
             tensors_.size() - 1, " more are unknown, expected those of a Llama or Qwen2 model");
}

}  // namespace engine
