"""vLLM as host: an unmodified vLLM stops writing rejected drafts to its paged KV cache.

    plugin        entry point of vllm.general_plugins: names our backends
    settings      --additional-config and the environment
    defaults      what our settings choose where users have said nothing: pure functions
    support       what is refused at start, with the reason and the remedy
    versions      what is particular to each version of vLLM that was read and run
    engine        one vLLM engine: what was asked of it, whether it stages, its runner
    registry      finds the engine of a vLLM configuration
    staging       its interceptor, over the caches of its layers
    steps         the round of each step: begin, write, finish
    draft_rows    which rows are drafts, which of them were accepted: pure functions
    commit_status what became of commits on a GPU, without waiting for it
    faults        what worker and scheduler do after a fault
    head_scores   logits of an EAGLE head over the tokens that it knows
    hooks         wrapped functions of vLLM: arguments, runners, prefix-cache hits, speculators
    backend       attention backends for the CPU and CUDA, and what their layers share
    scheduling    numbers of drafts by what steps took
    specpv        long contexts: drafts and verification over partial views
    tree          draft trees

Nothing is imported here: vLLM loads the plugin in every process it starts.
"""
