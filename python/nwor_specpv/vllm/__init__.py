"""vLLM as host: an unmodified vLLM stops writing rejected drafts to its paged KV cache.

    plugin       entry point of vllm.general_plugins: says which backend is ours
    settings     --additional-config and the environment
    support      what is refused at start, with the reason and the mend
    compat       versions and signatures that were looked at
    rows         which rows are drafts, which of them were accepted: pure functions
    engine       one vLLM engine: its interceptor, the round of a step, the commit
    layer        what layers of the target model share on every device
    cpu_backend  our layout, write and attention in place of CPU_ATTN
    cuda_backend vLLM's FlashAttention backend with our write and our attention for verify rows
    runner_hooks the one wrapped method of each model runner

Nothing is imported here: vLLM loads the plugin in every process it starts.
"""
