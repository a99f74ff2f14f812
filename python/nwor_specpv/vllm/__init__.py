"""vLLM as host: an unmodified vLLM stops writing rejected drafts to its paged KV cache.

    plugin       entry point of vllm.general_plugins: says which backend is ours
    settings     --additional-config and the environment
    support      what is refused at start, with the reason and the mend
    compat       versions and signatures that were looked at
    rows         which rows are drafts, which of them were accepted: pure functions
    engine       one vLLM engine: what was asked of it, whether it stages, its runner
    staging      its interceptor, over the caches of its layers
    steps        the round of each step: begin, write, finish
    status_mail  what became of commits on a GPU, without waiting for it
    caches       K and V of a layer's cache, rows written at once
    runner_hooks where model runners say what was accepted
    prefix_hits  steps in which a request reads what another one of them computes
    speculators  which speculator model runner V2 builds
    layer        what layers of the target model share on every device
    cpu_backend  our layout, write and attention in place of CPU_ATTN
    cuda_backend vLLM's FlashAttention backend with our write and our attention for verify rows:
                 flash_builder (the step), flash_layer (a layer), flash_metadata (between them),
                 prefix_planner and prefix_schedule (how FlashAttention-3 cuts prefixes)
    specpv       long contexts: drafts and verification over partial views

Nothing is imported here: vLLM loads the plugin in every process it starts.
"""
