"""The entry point of the plugin: vLLM calls `register` in every process, possibly more than once.

A module of its own, because importing the package loads its library: what does not fit this vLLM or
this torch is then a traceback, where it should be one line of the log.
"""

from __future__ import annotations


def register() -> None:
    from nwor_specpv.vllm import plugin

    plugin.register()
