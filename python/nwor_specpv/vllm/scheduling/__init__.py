"""vLLM's scheduler chooses in every step how many drafts the next one has, by what steps took.

    step_clock   how long a step took, and what was chosen for it
    decisions    what each step's drafts are, for all ranks, by `nwor_specpv.arms`
    scheduler    vLLM's scheduler with them

Long contexts (`specpv.scheduler`) and draft trees (`tree.scheduler`) say what there is to choose
from.
"""
