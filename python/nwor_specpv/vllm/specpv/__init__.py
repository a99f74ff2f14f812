"""Partial verification in vLLM: long contexts without reading the whole cache at every step.

    rules             what is refused at start, with the reason and the remedy
    views             per-request summaries, chosen blocks and views into the engine's cache
    tail              K/V of unconfirmed drafts, in memory of our own
    partial_pass      the target model over a view: what one forward pass of it needs
    policy            how many partial passes pay on model runner V1, from costs and acceptance
    drafter           mode `lossless` on model runner V1: a proposer vLLM loads by its class path
    turns             the passes of one of its proposals
    target            the target model as a drafter: partial passes
    costs             what passes cost there, measured at start
    chain             chains of drafts that grow on the device
    draft_loop        head and partial pass in turns, as graphs
    draft_models      vLLM's target and head on rows of ours
    speculator        mode `lossless` on model runner V2, in the place of vLLM's EAGLE speculator
    lengths           how many drafts and passes are possible there
    decisions         which drafts pay, by `nwor_specpv.arms`
    scheduler         vLLM's schedulers: with drafts that pay, or capping what is published
    refresh           mode `refresh`: the verify step itself attends to the view
    refresh_requests  which of its requests see their view in a step
    publishing        what its requests may give to the prefix cache
    failures          drafting that failed: counted, logged, agreed on by ranks
    late_counts       counts of the device, read without waiting
    drift             what mode `refresh` does to attention, measured on its full steps

Nothing provisional enters the engine's cache, a summary or a prefix hash in mode `lossless`.
"""
