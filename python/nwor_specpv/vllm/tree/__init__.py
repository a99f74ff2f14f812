"""Draft trees in vLLM, on model runner V2: a step verifies a tree of drafts for each request.

    rules        what is refused at start, with the reason and the remedy
    shape        how large a tree is
    store        the tree of every request, and the step that verifies them
    growth       how a head grows trees
    head         vLLM's EAGLE head over the rows of a tree
    speculator   in the place of vLLM's EAGLE speculator
    sampler      in the place of vLLM's rejection sampler
    decisions    how many rows they have where measured speed decides
    scheduler    vLLM's scheduler with these decisions

vLLM gives every row a slot by its place in the batch, as if drafts were a chain. Row j's slot is
then the destination of the path's token j, so the commit of a path is its compaction.
"""
