// A small engine on nwor_specpv: continues prompts of token ids with a Llama or Qwen2 model.
//
//   engine --model FOLDER --ids PROMPTS.json [--config FILE] [--out FILE] [--KEY VALUE ...]
//
// PROMPTS.json is a list of prompts, each a list of token ids. The result is JSON: new tokens of
// each prompt, why they end, and counts. Errors are one line and exit status 2; no file is written.
//
// Read on in this order: settings.h, weights.h, model.h, target.h, drafter.h, engine.h.

#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>

#include "engine.h"
#include "weights.h"

namespace engine {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Stats, steps, new_tokens, drafts, accepted, cut_tokens,
                                   violations, largest_batch, step_kinds, speculation_ended)

namespace {

using Prompts = std::vector<std::vector<int64_t>>;

// Files go to `files`; the rest are settings, over those of the file --config.
Settings ReadOptions(int argc, char** argv, std::map<std::string, fs::path>* files) {
  std::vector<std::pair<std::string, std::string>> keys;
  for (int i = 1; i < argc; i += 2) {
    std::string key = argv[i];
    NWOR_CHECK(key.starts_with("--"), "got '", key, "', expected an option that begins with --");
    NWOR_CHECK(i + 1 < argc, key, ": got no value, expected one");
    if (files->contains(key)) {
      files->at(key) = argv[i + 1];
      continue;
    }
    std::replace(key.begin() + 2, key.end(), '-', '_');
    keys.emplace_back(key.substr(2), argv[i + 1]);
  }
  Settings settings;
  if (!files->at("--config").empty()) settings.ReadFile(files->at("--config"));
  for (const auto& [key, value] : keys) settings.Set(key, value);
  NWOR_CHECK(!files->at("--model").empty(), "--model: got none, expected the folder of a model");
  NWOR_CHECK(!files->at("--ids").empty(), "--ids: got none, expected a JSON file of prompts");
  settings.Validate();
  return settings;
}

Prompts ReadPrompts(const fs::path& file) {
  const Json json = ReadJson(file);
  const auto is_token = [](const Json& token) { return token.is_number_integer(); };
  const auto is_prompt = [&](const Json& prompt) {
    return prompt.is_array() && std::all_of(prompt.begin(), prompt.end(), is_token);
  };
  NWOR_CHECK(json.is_array() && !json.empty() && std::all_of(json.begin(), json.end(), is_prompt),
             file.string(), ": expected a list of prompts, each a list of token ids");
  return json.get<Prompts>();
}

Json Result(const Engine& engine, double seconds) {
  Json result = {{"stats", engine.stats()}};
  for (const Request& request : engine.requests()) {
    result["token_ids"].push_back(std::vector<int64_t>(request.tokens.begin() + request.prompt_len,
                                                       request.tokens.begin() + request.shown));
    result["finish"].push_back(request.finish);
  }
  result["stats"]["seconds"] = seconds;
  return result;
}

// A file is written beside its place and renamed: it is there whole or not at all.
void Write(const fs::path& out, const std::string& text) {
  const fs::path beside = out.string() + ".part";
  std::ofstream stream(beside);
  stream << text << "\n";
  stream.close();
  std::error_code failed;
  if (stream) fs::rename(beside, out, failed);
  if (!stream || failed) {
    fs::remove(beside, failed);
    throw nwor::Error(nwor::Concat("--out: '", out.string(), "' cannot be written"));
  }
}

void Main(int argc, char** argv) {
  const c10::InferenceMode no_gradients;
  std::map<std::string, fs::path> files = {
      {"--model", {}}, {"--ids", {}}, {"--out", {}}, {"--config", {}}};
  const Settings settings = ReadOptions(argc, argv, &files);
  const Prompts prompts = ReadPrompts(files["--ids"]);
  NWOR_CHECK(settings.device == "cpu" || at::hasCUDA(), "device: got '", settings.device,
             "', but this LibTorch finds no GPU; use cpu");
  Model model(files["--model"], at::Device(settings.device), settings.cuda_graphs);
  Engine engine(settings, model, prompts);
  const auto began = std::chrono::steady_clock::now();
  engine.Run();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
  const std::string text = Result(engine, taken.count()).dump();
  files["--out"].empty() ? void(std::cout << text << "\n") : Write(files["--out"], text);
}

}  // namespace
}  // namespace engine

int main(int argc, char** argv) {
  std::string problem;
  try {
    engine::Main(argc, argv);
    return 0;
  } catch (const c10::Error& error) {  // LibTorch's have a backtrace below
    problem = error.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    problem = "memory: not enough for this model and these prompts";
  } catch (const std::exception& error) {
    problem = error.what();
  }
  std::cerr << "engine: " << problem.substr(0, problem.find('\n')) << "\n";
  return 2;
}
